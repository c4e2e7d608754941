"""headstart in a Python process: the server without HTTP."""
