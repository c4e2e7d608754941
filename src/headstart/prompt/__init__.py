"""Messages → text → tokens, pure."""
