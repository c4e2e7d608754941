"""Serve: serves several models, from binding the port to a graceful end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import structlog

from headstart.api.auth import Keys
from headstart.api.entrance import Entrance, Network
from headstart.chat.tenancy import policy_of
from headstart.config import Settings
from headstart.models.app import create_front
from headstart.models.channel import ProcessSetup
from headstart.models.front import ModelsFront
from headstart.models.naming import ModelNames, NamedModel
from headstart.models.passed import PassedKey
from headstart.models.plan import MemoryShares
from headstart.models.pool import Backend, ModelPool
from headstart.models.process import ModelProcess
from headstart.models.spawn import spawner
from headstart.names import as_variable
from headstart.units import count, show_size


@dataclass(frozen=True, slots=True)
class SeveralModels:
    """Which models a server has, and how many it keeps.

    Attributes:
        models: all models, in order.
        settings: of each model, but for its file.
        memory: bytes of host memory for all of them.
        keep: most loaded models; None to choose by the memory.
        idle_unload: seconds without a request after which a model is unloaded; None to keep it.
        default: name of the model of requests that name none; None for the first.
        serves_pulled: whether models that callers fetch are served too. Those that were fetched before are among `models`.
    """

    models: Sequence[NamedModel]
    settings: Settings
    memory: int
    keep: int | None = None
    idle_unload: float | None = None
    default: str | None = None
    serves_pulled: bool = False


def serve(several: SeveralModels, network: Network) -> None:
    """Serves models until SIGINT or SIGTERM, in a process of its own, with one more process for each loaded model.

    Raises:
        ConfigError: what `Entrance` raises, a name occurs twice, or no model fits into the memory.
    """
    entrance = Entrance(network)
    try:
        front = front_of(several, network, entrance.keys)
        page = not several.settings.no_web
        app = create_front(
            front, keys=entrance.keys, hosts=network.hosts, cors=network.cors, page=page, pullers=network.pullers
        )
        shares = front.pool.shares
        structlog.get_logger("headstart").info(
            f"serving {count(len(front.names.models), 'model')}",
            default=front.names.default.name,
            memory=show_size(shares.total),
            keep_loaded=shares.keep,
        )
        for model in front.names.models:
            if not shares.holds(model.size):
                what = "this model cannot be loaded: its weights do not fit into the memory for all models"
                structlog.get_logger("headstart").warning(what, model=model.name, weights=show_size(model.size))
        server = entrance.server(app, several.settings.drain)
        entrance.announce(page=page)
        entrance.run(server)
    finally:
        entrance.close()


def front_of(several: SeveralModels, network: Network, keys: Keys) -> ModelsFront:
    """The front of several models. Raises ConfigError."""
    names = ModelNames(several.models, several.default)
    policy = policy_of(network.isolate, several=keys.several)
    isolate = network.isolate or ("key" if keys.several else "none")
    shares = MemoryShares.of(several.memory, [model.size for model in names.models], several.keep)

    def setup(model: NamedModel, memory: int) -> ProcessSetup:
        limits = [PassedKey(key.tenant, key.operator, key.expire) for key in keys.all() if key.expire is not None]
        return ProcessSetup(
            replace(several.settings, model=model.file, memory=memory),
            model.names,
            model.tag,
            isolate,
            tuple(network.keep_noise),
            tuple(limits),
            network.log_format,
            pool.shares.together,
        )

    library = several.settings.llama_lib  # they load llama.cpp before they know their settings
    processes = spawner({} if library is None else {as_variable("llama_lib"): str(library)})

    async def start() -> Backend:
        return await ModelProcess.start(processes)

    pool = ModelPool(names, shares, start=start, setup=setup, queue=several.settings.queue, idle_unload=several.idle_unload)
    seconds, pulled = several.settings.drain, several.serves_pulled
    return ModelsFront(pool, policy, seconds=seconds, serves_pulled=pulled, close=processes.close)
