"""A conversation, whoever sends it: one form for all dialects. Speaks no HTTP."""
