"""The front of a fleet: what must be known of an HTTP request before a replica is chosen for it.

body, key ──▶ prompts.PromptReader ──▶ the chain of its prompt
path, body ──▶ affinity.wanted_tag ──▶ the replica that keeps what the request refers to
"""
