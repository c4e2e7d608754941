"""Metrics, logs and the per-request report. Decides nothing."""
