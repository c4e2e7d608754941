from __future__ import annotations

from pathlib import Path

import pytest
from filelock import FileLock

from headstart.errors import HubError, ModelError
from headstart.hub.cache import HubCache
from headstart.hub.folders import Folders
from headstart.hub.names import find
from headstart.hub.pull import pull
from headstart.hub.remove import find_partial, partial_models, remove, remove_partial
from hub_server import HubRepo, HubServer
from model_folders import cached, hf_files

NAME = "Own/Tiny-GGUF"


@pytest.fixture
def repo(hub: HubServer) -> HubRepo:
    hub.repos[NAME] = HubRepo({"n-Q4_0.gguf": b"GGUF4".ljust(5000, b"."), "n-Q8_0.gguf": b"GGUF8".ljust(9000, b".")})
    return hub.repos[NAME]


def files(root: Path) -> set[Path]:
    return {path for path in root.rglob("*") if path.suffix != ".lock" and not path.is_dir()}


def test_what_was_fetched_goes_and_all_else_stays(repo: HubRepo, places: Folders) -> None:
    other = cached(places.hub, "other/m", {"m-Q4_0.gguf": 10})
    before = files(places.hub)
    model = pull(f"{NAME}:Q4_0", folders=places)
    kept = pull(f"{NAME}:Q8_0", folders=places)
    assert remove(model, places) == 5000
    assert kept.path.read_bytes() == repo.files["n-Q8_0.gguf"]
    assert remove(kept, places) == 9000
    assert files(places.hub) == before
    assert (other / "m-Q4_0.gguf").exists()
    assert not HubCache(places.hub, NAME).folder.exists()
    assert not [*(places.state / "fetched").iterdir()]


def test_older_versions_go_with_the_latest(repo: HubRepo, places: Folders) -> None:
    pull(f"{NAME}:Q4_0", folders=places)
    repo.commit, repo.files["n-Q4_0.gguf"] = "f" * 40, b"GGUFn".ljust(600, b".")
    assert remove(pull(f"{NAME}:Q4_0", folders=places), places) == 5600
    assert not files(places.hub)


def test_a_content_of_two_files_stays_until_the_second_goes(repo: HubRepo, places: Folders) -> None:
    repo.files["copy-Q6_K.gguf"] = repo.files["n-Q4_0.gguf"]
    one, two = pull(f"{NAME}:Q4_0", folders=places), pull(f"{NAME}:Q6_K", folders=places)
    assert remove(one, places) == 0
    assert two.path.read_bytes() == repo.files["n-Q4_0.gguf"]
    assert remove(two, places) == 5000


def test_what_others_have_fetched_is_refused(repo: HubRepo, places: Folders) -> None:
    cached(places.hub, "o/n", {"n-Q4_0.gguf": 10})
    model = find("o/n", places)
    with pytest.raises(ModelError, match=r"headstart did not fetch o/n:Q4_0, .*`hf cache rm`"):
        remove(model, places)
    assert model.path.exists()


def test_what_a_process_uses_is_refused(repo: HubRepo, places: Folders) -> None:
    model = pull(f"{NAME}:Q4_0", folders=places)
    with model.path.open("rb"), pytest.raises(ModelError, match=r"is in use by .* \(process \d+\); stop that first"):
        remove(model, places)
    with (
        FileLock(HubCache(places.hub, NAME).lock(model.path.resolve().name)),
        pytest.raises(ModelError, match="is being fetched by another process"),
    ):
        remove(model, places)
    assert model.path.exists()


def test_no_link_leads_the_deletion_out_of_the_cache(repo: HubRepo, places: Folders, tmp_path: Path) -> None:
    model = pull(f"{NAME}:Q4_0", folders=places)
    outside = tmp_path / model.path.resolve().name
    outside.write_bytes(b"mine")
    older = HubCache(places.hub, NAME).snapshot("a" * 40) / "n-Q4_0.gguf"
    older.parent.mkdir()
    older.symlink_to(outside)
    assert remove(model, places) == 5000
    assert outside.read_bytes() == b"mine"
    assert older.is_symlink()


def test_a_partial_file_is_listed_and_removed(hub: HubServer, repo: HubRepo, places: Folders) -> None:
    hub.faults.ranges, hub.faults.cut = False, 2000
    with pytest.raises(HubError):
        pull(f"{NAME}:Q4_0", folders=places)
    (partial,) = partial_models(places)
    assert (partial.name, partial.total) == (f"{NAME}:Q4_0", 5000)
    assert 0 < partial.size <= 2000
    assert find_partial(NAME, places) == find_partial(f"{NAME}:q4_0", places) == [partial]
    assert find_partial(f"{NAME}:Q8_0", places) == find_partial("x", places) == []
    assert remove_partial([partial], places) == partial.size
    assert not files(places.hub)
    assert partial_models(places) == []


def test_a_folder_goes_whole(hub: HubServer, places: Folders) -> None:
    hub.repos["o/m"] = HubRepo(hf_files())
    model = pull("o/m", folders=places)
    with model.paths[-1].open("rb"), pytest.raises(ModelError, match="is in use by"):
        remove(model, places)
    assert remove(model, places) == sum(len(data) for name, data in hf_files().items() if name not in ("README.md", "code.py"))
    assert not files(places.hub)


def test_an_unfinished_folder_goes_whole_unless_it_is_being_fetched(hub: HubServer, places: Folders) -> None:
    hub.repos["o/m"] = HubRepo(hf_files())
    hub.repos["o/m"].digests["model-00002-of-00002.safetensors"] = "0" * 64
    with pytest.raises(HubError, match="another hash"):
        pull("o/m", folders=places)
    begun = partial_models(places)
    assert len(begun) == 5
    before = files(places.hub)
    with (
        FileLock(HubCache(places.hub, "o/m").lock(begun[-1].digest)),
        pytest.raises(ModelError, match="is being fetched by another process"),
    ):
        remove_partial(begun, places)
    assert files(places.hub) == before
    assert remove_partial(find_partial("o/m", places), places) == sum(one.size for one in begun)
    assert not files(places.hub)
