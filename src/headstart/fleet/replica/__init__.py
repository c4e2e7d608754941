"""The replica's side of routing: what one `Runtime` of a fleet tells the routers.

    cache, slots, scheduler ──calls──▶ journal.Journal ──drained──▶ reporter.Reporter ──▶ ReplicaReport ──wire──▶ bytes
         (engine thread)                                 (another thread)

Read `held`, `live`, `rumours`, `load`, `speed`, `journal`, `reporter`, then `wire`.
"""
