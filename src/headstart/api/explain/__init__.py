"""What was computed and why, over HTTP."""
