"""Real agents, unchanged, run against this server in a network with loopback only."""
