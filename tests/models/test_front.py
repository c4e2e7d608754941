"""What a server of several models says of them, when files come and go."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from headstart.api.auth import Keys
from headstart.api.incoming import SMALL_BODY
from headstart.api.served_models import SERVES_GIVEN
from headstart.chat.tenancy import POLICIES
from headstart.config import Settings
from headstart.errors import NotFound
from headstart.models.app import create_front
from headstart.models.channel import ProcessSetup
from headstart.models.front import ModelsFront, PoolModels
from headstart.models.naming import ModelNames, NamedModel
from headstart.models.plan import MemoryShares
from headstart.models.pool import Backend, ModelPool

FETCHED = NamedModel("own/tiny:Q8_0", "q8.gguf", 1, ("own/tiny",), fetched=True)


async def _start() -> Backend:
    raise OSError("nothing is started here")


def pool_of(removed: set[str]) -> ModelPool:
    names = ModelNames([NamedModel("a", "a.gguf", 1), NamedModel("b", "b.gguf", 1), FETCHED])
    return ModelPool(
        names,
        MemoryShares(40, 2, 10),
        start=_start,
        setup=lambda model, memory: ProcessSetup(Settings(model=model.file), model.names, model.tag, "none"),
        queue=1,
        exists=lambda file: file not in removed,
    )


def test_a_fetched_model_whose_file_was_removed_is_in_no_list() -> None:
    removed: set[str] = set()
    pool = pool_of(removed)
    models = PoolModels(pool, True)
    assert [model.id for model in models.all()] == ["a", "b", "own/tiny:Q8_0"]
    removed |= {"q8.gguf", "a.gguf"}
    assert [model.id for model in models.all()] == ["a", "b"]
    assert [pooled.model.name for pooled in pool.models] == ["a", "b"]
    assert models.named("own/tiny") is None
    with pytest.raises(NotFound, match=r"served are 'a', 'b'\.$"):
        models.find("own/tiny")
    assert models.fetched(("own/tiny:Q4_0", "own/tiny"), "q4.gguf", 2) == ""
    assert models.find("own/tiny").id == "own/tiny:Q4_0"


@pytest.mark.parametrize("path", ["/v1/models/load", "/v1/models/unload"])
def test_a_body_that_only_names_a_model_is_small(path: str) -> None:
    async def test() -> httpx.Response:
        app = create_front(ModelsFront(pool_of(set()), POLICIES["none"]), keys=Keys())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            return await http.post(path, json={"model": "a", "junk": "x" * SMALL_BODY})

    answer = asyncio.run(test())
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"


def test_a_model_of_the_command_stays_and_is_fetched_again() -> None:
    pool = pool_of({"a.gguf"})
    models = PoolModels(pool, True)
    assert models.find("a").id == "a"
    assert models.named("a") is None, "a pull must fetch it"
    assert models.fetched(("own/a:Q8_0",), "a.gguf", 1) == ""
    assert "has the name 'B'" in models.fetched(("B",), "other.gguf", 1)
    given = PoolModels(pool, False)
    assert given.fetched(("own/a:Q8_0",), "a.gguf", 1) == ""
    assert given.fetched(("n",), "n.gguf", 1) == SERVES_GIVEN
