"""The app of several models: its OpenAPI document is true."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis

import tiny
from fuzzing import fuzz
from process import serving

EXAMPLES = 200
ENDLESS = "/headstart/events"


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The document of a server with memory for one of two models. Replies are short, and no models may be fetched."""
    folder = tmp_path_factory.mktemp("models")
    for name, architecture in (("attention", "llama"), ("hybrid", "qwen35")):
        tiny.write(folder / f"{name}.gguf", architecture)
    options = ("--ctx", "256", "--slots", "2", "--threads", "1", "--memory-budget", "32MiB", "--port", "0")
    with serving("--models-dir", str(folder), "--keep-loaded", "1", *options, HF_HUB_OFFLINE="1") as server:
        yield schemathesis.openapi.from_url(f"{server.address()}/openapi.json")
        assert server.end() == 0
        log = "".join(server.rest())
        assert "Traceback" not in log
        assert "internal error" not in log


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("positive", [True, False], ids=["allowed", "not-allowed"])
def test_the_document_of_several_models_is_true_and_nothing_is_a_server_error(schema: Any, positive: bool) -> None:
    operations = [found.ok() for found in schema.get_all_operations()]
    statuses = {operation.path: operation.responses.status_codes for operation in operations}
    assert "502" in statuses["/v1/chat/completions"]
    assert "502" not in statuses["/v1/models/load"]
    for operation in operations:
        method, path = operation.method.upper(), operation.path
        if path != ENDLESS and "200" in operation.responses.status_codes and (positive or method == "POST"):
            fuzz(schema, method, path, positive=positive, examples=EXAMPLES)
