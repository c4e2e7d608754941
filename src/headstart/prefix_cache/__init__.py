"""The prefix cache, pure: what is known of tokens, what to reuse, what to keep. No I/O, no clock, no globals."""
