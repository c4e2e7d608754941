"""A simulator of a fleet: what a recorded trace would find with several replicas, a router and perhaps a shared tier.

It is a simulation of events, with the real router (`router`). Read `machine` (what is modelled), `tiers`, `replica`,
`routings`, then `simulation`.
"""
