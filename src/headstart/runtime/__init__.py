"""The life of a request: composes core, engine and stores. Speaks no HTTP."""
