"""One engine thread: the life of a request. Composes the prefix cache, an engine and the tiers. Speaks no HTTP."""
