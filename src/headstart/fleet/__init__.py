"""headstart on several machines.

* `router`: the router's core, which chooses a replica by what each one holds. Pure.
* `replica`: what one server tells the router.
* `front`: what is read of a request before a replica is chosen, and the choice.
* `cluster`: all of that as a deployment on Ray Serve.
* `simulator`: a fleet without machines.

Nothing that runs on one machine imports this package, except `headstart fleet` and `headstart replay --fleet`.
"""
