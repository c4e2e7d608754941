"""Measurements of headstart and its peers, paired in one run: `python -m benchmarks --help`."""
