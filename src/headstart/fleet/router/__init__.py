"""The router's core: which replica of a fleet serves a request. All of it is pure: the caller passes the time.

    ReplicaReport ──▶ reports.Sequencer ──▶ holdings.Holdings     what each replica holds, by tier
                                └──▶ costs.Board           its speed and its queue
    tokens ──▶ chains.chain_of ──▶ Holdings.reach ──▶ Board.estimate ──▶ the replica with the least cost ──▶ book.Book

Read `reports`, `chains`, `holdings`, `curve`, `costs`, `book`, then `router`. Replicas use `slots` for their reports.
"""
