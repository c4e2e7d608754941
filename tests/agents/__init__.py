"""Agents as their makers ship them, run against this server with nothing but loopback to reach."""
