"""Metrics, logs and the summary of a call. Nothing here changes how requests are served."""
