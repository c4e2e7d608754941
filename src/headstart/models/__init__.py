"""Models: several models in one server. Each is loaded when it is asked for, in a process of its own.

client ──▶ front (keys, names, one memory plan) ──▶ the process of a model, an ordinary server of one model
"""
