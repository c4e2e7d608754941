"""Simulation: a server with its tiers, disk and clients in one thread, decided by one seed (docs/simulation.md)."""
