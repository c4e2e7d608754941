"""Simulation: a server with its cache, its tiers, its disk and its clients in one thread, all decided by one seed (docs/simulation.md)."""
