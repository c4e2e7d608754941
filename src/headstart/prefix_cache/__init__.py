"""The prefix cache: what is known of prompts, what to reuse and what to keep. Pure; README.md has the order in which to read
it.
"""
