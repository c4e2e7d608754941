"""Serve: serves one model, from binding the port to a graceful end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from headstart.api.app import create_app
from headstart.api.entrance import Entrance, Network
from headstart.api.garbage import Garbage
from headstart.config import Settings
from headstart.errors import ConfigError, HeadstartError
from headstart.model_names import model_names
from headstart.serving.runtime import Runtime


def serve(
    settings: Settings, network: Network, *, alias: Sequence[str] = (), load: Callable[[Settings], Runtime]
) -> None:
    """Serves a model until SIGINT or SIGTERM, in a process of its own: see `server`.

    This function ends the process after a second signal, or if the model cannot be freed in time. A model that is still loading
    can never be freed.

    Args:
        alias: names of the model. The first one is the served name. The names of the model file are also accepted.
        load: makes the runtime. It runs in a thread while `/health` reports that the model is loading.

    Raises:
        ConfigError: what `Entrance` raises, an alias is empty, or the model cannot be used.
    """
    entrance, ending = Entrance(network), ExitStack()
    failures: list[HeadstartError] = []

    def failed(error: HeadstartError) -> None:
        failures.append(error)
        server.should_exit = True

    def ready() -> None:
        # Loaded objects stay for good. Unfrozen, the collector would scan them for each large body, sometimes for 25 ms.
        ending.callback(Garbage(app.state.service.idle).close)
        entrance.announce(page=not settings.no_web)

    try:
        if not all(name.strip() for name in alias):
            raise ConfigError("--alias must not be empty.")
        names = tuple(dict.fromkeys((*alias, *model_names(settings.model))))
        app = create_app(
            lambda: load(settings),
            api_keys=entrance.keys,
            isolate=network.isolate,
            keep_noise=network.keep_noise,
            model_id=names[0],
            aliases=names,
            hosts=network.hosts,
            cors=network.cors,
            page=not settings.no_web,
            pullers=network.pullers,
            on_ready=ready,
            on_failure=failed,
        )
        server = entrance.server(app, settings.drain)
        entrance.run(server)
    finally:
        ending.close()
        entrance.close()
    if failures:
        raise failures[0]
