"""Measurements, side by side with the peer in one run: `python -m benchmarks --help`."""
