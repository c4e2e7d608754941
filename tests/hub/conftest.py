from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headstart.hub.folders import Folders
from hub_server import HubServer, hub_server
from model_folders import folders


@pytest.fixture(scope="module")
def running_hub() -> Iterator[HubServer]:
    with hub_server() as server:
        yield server


@pytest.fixture
def hub(running_hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> HubServer:
    """A hub without repositories and faults, which HF_ENDPOINT names. There is no token, and pauses are short."""
    running_hub.repos, running_hub.requests, running_hub.sent = {}, [], 0
    running_hub.faults = type(running_hub.faults)()
    monkeypatch.setenv("HF_ENDPOINT", running_hub.url)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr("headstart.hub.download.PAUSE", 0.001)
    return running_hub


@pytest.fixture
def places(tmp_path: Path) -> Folders:
    return folders(tmp_path)
