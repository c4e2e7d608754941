"""headstart on several machines: the router's core (`router`) and a simulator of a fleet (`simulator`).

Nothing that runs on one machine imports this package, except `headstart replay --fleet`.
"""
