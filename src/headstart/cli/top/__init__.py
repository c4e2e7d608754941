"""`headstart top`: a server in a terminal, as it works.

server ──events──▶ feed (a thread) ──batches──▶ state ──▶ tree, savings ──▶ text ──▶ app (textual)

Only `app` imports textual. `stream`, `state`, `tree`, `savings` and `text` are pure.
"""
