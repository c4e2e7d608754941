"""`pull` against a hub of our own, over HTTP."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from headstart.errors import HubError, ModelError
from headstart.hub import pull as pulling
from headstart.hub.cache import HubCache
from headstart.hub.finders import hugging_face
from headstart.hub.folders import Folders
from headstart.hub.names import find
from headstart.hub.progress import PullProgress
from headstart.hub.pull import pull, resolve
from headstart.hub.remove import check_removable, partial_models
from hub_server import HubRepo, HubServer
from model_folders import cached, hf_files

SIZE = 1_000_000
NAME = "Own/Tiny-GGUF"


def content(seed: int, size: int = SIZE) -> bytes:
    return b"GGUF" + random.Random(seed).randbytes(size - 4)


@pytest.fixture
def repo(hub: HubServer) -> HubRepo:
    hub.repos[NAME] = HubRepo(
        {
            "README.md": b"Hello.",
            "tiny-Q4_K_M.gguf": content(1),
            "tiny-Q8_0.gguf": content(2, 2 * SIZE),
            "mmproj-tiny-F16.gguf": content(3, 1000),
        },
        small={"README.md"},
    )
    return hub.repos[NAME]


def fits(size: int) -> bool:
    return True


def partials(places: Folders) -> list[Path]:
    return [*places.hub.rglob("*.incomplete")]


def leavings(places: Folders) -> set[str]:
    """What is in the cache beside contents, links, the commit and locks."""
    kinds = ("blobs", "snapshots", "refs", ".locks")
    return {str(path) for path in places.hub.rglob("*") if path.is_file() and not set(kinds) & set(path.parts)}


def test_a_model_is_fetched_and_found(hub: HubServer, repo: HubRepo, places: Folders) -> None:
    told: list[PullProgress] = []
    model = pull(NAME, told.append, places, fits)
    assert (model.name, model.source, model.size) == (f"{NAME}:Q4_K_M", "headstart", SIZE)
    assert model.path.read_bytes() == repo.files["tiny-Q4_K_M.gguf"]
    assert model.path.resolve().name == hashlib.sha256(repo.files["tiny-Q4_K_M.gguf"]).hexdigest()
    assert find(NAME, places, fits) == model
    assert (told[0].done, told[-1].done) == (0, SIZE)
    assert {(one.file, one.total, one.digest) for one in told} == {("tiny-Q4_K_M.gguf", SIZE, model.path.resolve().name)}
    assert [one.done for one in told] == sorted(one.done for one in told)
    assert not partials(places)
    assert not leavings(places)


def test_what_is_here_is_not_fetched_again(hub: HubServer, repo: HubRepo, places: Folders) -> None:
    first = pull(f"{NAME}:q8_0", folders=places)
    sent = hub.sent
    assert pull(f"{NAME}:Q8_0", folders=places) == first
    assert hub.sent == sent == 2 * SIZE
    asked = len(hub.requests)
    assert resolve(NAME, folders=places, fits=fits) == first  # a quantisation that is here will do, and no network is needed
    assert len(hub.requests) == asked


def test_another_version_is_fetched_beside_the_first(hub: HubServer, repo: HubRepo, places: Folders) -> None:
    pull(NAME, folders=places, fits=fits)
    repo.commit, repo.files["tiny-Q4_K_M.gguf"] = "f" * 40, content(9, 500)
    assert resolve(NAME, folders=places, fits=fits).size == SIZE
    assert pull(NAME, folders=places, fits=fits).size == 500
    assert find(NAME, places, fits).size == 500


def test_parts_come_together(hub: HubServer, places: Folders) -> None:
    files = {f"BF16/big-BF16-0000{number}-of-00003.gguf": content(number, 5000 + number) for number in (1, 2, 3)}
    hub.repos["o/n"] = HubRepo(files, small={"BF16/big-BF16-00002-of-00003.gguf"})
    model = pull("o/n", folders=places, fits=fits)
    assert [path.read_bytes() for path in model.paths] == [*files.values()]
    assert model.name == "o/n:BF16"
    assert len({path.parent for path in model.paths}) == 1


def test_other_programs_find_it_too(hub: HubServer, repo: HubRepo, places: Folders) -> None:
    from huggingface_hub import hf_hub_download, scan_cache_dir

    model = pull(NAME, folders=places, fits=fits)
    there = hf_hub_download(NAME, "tiny-Q4_K_M.gguf", cache_dir=places.hub, local_files_only=True)
    assert Path(there) == model.path
    scanned = scan_cache_dir(places.hub)
    assert not scanned.warnings
    assert [found.repo_id for found in scanned.repos] == [NAME]


# ── interruptions ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_connection_goes_on(ranges: bool, hub: HubServer, repo: HubRepo, places: Folders) -> None:
    hub.faults.cut, hub.faults.ranges = 400_000, ranges
    if not ranges:
        with pytest.raises(HubError, match="is kept: the same command goes on"):
            pull(NAME, folders=places, fits=fits)
        hub.faults.cut = None
    model = pull(NAME, folders=places, fits=fits)
    assert model.path.read_bytes() == repo.files["tiny-Q4_K_M.gguf"]
    if ranges:
        starts = [int(request.range.removeprefix("bytes=").partition("-")[0]) for request in hub.contents()]
        assert starts[0] == 0 < starts[1] < starts[2]
        assert hub.sent < 1.5 * SIZE


class Stop(Exception):
    pass


def stop_at(share: float, places: Folders) -> None:
    """A pull that ends when this share of the file is here."""

    def report(progress: PullProgress) -> None:
        if progress.done >= share * progress.total:
            raise Stop

    with pytest.raises(Stop):
        pull(NAME, report, places, fits)


def test_an_interrupted_pull_goes_on(hub: HubServer, repo: HubRepo, places: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.hub.progress._EVERY", 0.0)
    stop_at(0.4, places)
    (partial,) = partials(places)
    here = partial.stat().st_size
    assert 0.4 * SIZE <= here < SIZE
    with pytest.raises(ModelError):
        find(NAME, places, fits)  # what is partial is no model
    hub.requests.clear()
    told: list[PullProgress] = []
    assert pull(NAME, told.append, places, fits).path.read_bytes() == repo.files["tiny-Q4_K_M.gguf"]
    assert told[0].done == here
    assert [request.range for request in hub.contents()] == [f"bytes={here}-{SIZE - 1}"]
    assert not partials(places)


def test_a_busy_hub_is_asked_again_a_few_times(hub: HubServer, repo: HubRepo, places: Folders) -> None:
    hub.faults.statuses = [503, 429, 500]
    assert pull(NAME, folders=places, fits=fits).size == SIZE
    hub.faults.statuses = [503] * 50
    with pytest.raises(HubError, match=r"answers with an error \(503\)"):
        pull(f"{NAME}:Q8_0", folders=places)
    assert len(hub.faults.statuses) == 45


def test_large_files_are_asked_for_in_slices(
    hub: HubServer, repo: HubRepo, places: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstart.hub.client.SLICE", 300_000)
    assert pull(NAME, folders=places, fits=fits).path.read_bytes() == repo.files["tiny-Q4_K_M.gguf"]
    assert [request.range for request in hub.contents()] == [
        f"bytes={start}-{min(start + 300_000, SIZE) - 1}" for start in range(0, SIZE, 300_000)
    ]


def test_what_another_program_has_fetched_counts_as_asked_for(hub: HubServer, repo: HubRepo, places: Folders) -> None:
    first = pull(NAME, folders=places, fits=fits)
    shutil.rmtree(places.state)
    assert [(model.source, model.pulled) for model in hugging_face(places)] == [("Hugging Face", False)]
    again = pull(NAME, folders=places, fits=fits)
    assert (again.path, again.source, again.pulled) == (first.path, "Hugging Face", True)
    with pytest.raises(ModelError, match="another program has fetched it"):
        check_removable(again)


# ── what is wrong ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("small", [True, False])
def test_another_hash_is_refused_and_removed(small: bool, hub: HubServer, places: Folders) -> None:
    repo = hub.repos["o/n"] = HubRepo({"n-Q4_0.gguf": content(1, 5000)}, small={"n-Q4_0.gguf"} if small else set())
    repo.digests["n-Q4_0.gguf"] = ("ab" * 32)[: 40 if small else 64]
    with pytest.raises(HubError, match=r"another hash than .* was removed"):
        pull("o/n", folders=places, fits=fits)
    assert not [path for path in places.hub.rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert not [*(places.state / "fetched").iterdir()]
    repo.digests.clear()
    assert pull("o/n", folders=places, fits=fits).size == 5000


@pytest.mark.parametrize("says", [4000, 6000])
def test_another_size_than_the_hub_says(says: int, hub: HubServer, places: Folders) -> None:
    repo = hub.repos["o/n"] = HubRepo({"n-Q4_0.gguf": content(1, 5000)}, sizes={"n-Q4_0.gguf": says})
    with pytest.raises(HubError):
        pull("o/n", folders=places, fits=fits)
    repo.sizes.clear()
    assert pull("o/n", folders=places, fits=fits).path.read_bytes() == repo.files["n-Q4_0.gguf"]


def test_a_disk_that_is_too_full_is_refused_before_the_first_byte(
    hub: HubServer, repo: HubRepo, places: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(places.state.parent)
    monkeypatch.setattr(pulling.shutil, "disk_usage", lambda _: usage._replace(free=pulling.SPARE + SIZE + 10))
    with pytest.raises(HubError) as error:
        pull(f"{NAME}:Q8_0", folders=places)
    assert "Q8_0 needs 1.91 MiB more" in str(error.value)
    assert "65 MiB are free, and 64 MiB must stay free." in str(error.value)
    assert "choose a smaller quantisation (Q4_K_M (977 KiB))" in str(error.value)
    assert not hub.contents()
    assert not places.hub.exists()
    assert pull(f"{NAME}:Q4_K_M", folders=places).size == SIZE


def test_a_disk_that_becomes_full_keeps_what_is_there(
    hub: HubServer, repo: HubRepo, places: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = 0

    def write(file: int, data: memoryview) -> int:
        nonlocal written
        if written >= 500_000:
            raise OSError(28, "No space left on device")
        written += (count := os_write(file, data))
        return count

    os_write = os.write
    with monkeypatch.context() as patched:
        patched.setattr("headstart.hub.download.os.write", write)
        with pytest.raises(HubError, match=r"is full\. What is here is kept"):
            pull(NAME, folders=places, fits=fits)
    assert partials(places)[0].stat().st_size == written
    assert pull(NAME, folders=places, fits=fits).path.read_bytes() == repo.files["tiny-Q4_K_M.gguf"]
    assert hub.sent >= SIZE


def test_a_folder_that_cannot_be_written(hub: HubServer, repo: HubRepo, places: Folders) -> None:
    places.hub.parent.mkdir(parents=True)
    places.hub.write_text("")
    with pytest.raises(HubError, match=r"Cannot write into .*set HF_HOME"):
        pull(NAME, folders=places, fits=fits)
    places.hub.unlink()
    places.state.parent.mkdir(parents=True, exist_ok=True)
    places.state.write_text("")
    with pytest.raises(HubError, match=r"Cannot write into .*set HEADSTART_STATE_DIR"):
        pull(NAME, folders=places, fits=fits)


@pytest.mark.parametrize("number", [errno.EPIPE, errno.ENOSPC])
def test_an_error_of_the_caller_s_report_is_the_caller_s(number: int, hub: HubServer, repo: HubRepo, places: Folders) -> None:
    """Fault: it was taken for one of the disk, and the message said so."""
    error = OSError(number, "the caller's own")

    def report(progress: PullProgress) -> None:
        raise error

    with pytest.raises(OSError, match="the caller's own") as raised:
        pull(NAME, report, places, fits)
    assert raised.value is error
    assert pull(NAME, folders=places, fits=fits).path.read_bytes() == repo.files["tiny-Q4_K_M.gguf"]


def test_without_a_network_the_models_here_are_named(hub: HubServer, places: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    cached(places.hub, "o/here", {"here-Q4_0.gguf": 10})
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match=r"http://127\.0\.0\.1:9 cannot be reached .* On this machine are: .*o/here:Q4_0\.$"):
        resolve("o/other", folders=places)
    assert resolve("o/here", folders=places).size == 10
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(HubError, match=r"HF_HUB_OFFLINE is set.*o/here:Q4_0\.$"):
        resolve("o/other", folders=places)
    assert pull("o/here:Q4_0", folders=places) == resolve("o/here", folders=places)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set"):
        pull("o/here:Q8_0", folders=places)


def test_who_may_read_what(hub: HubServer, places: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["o/gated"] = HubRepo({"n-Q4_0.gguf": content(1, 5000)}, gated=True)
    hub.repos["o/private"] = HubRepo({"n-Q4_0.gguf": content(1, 5000)}, private=True)
    with pytest.raises(HubError, match=rf"o/gated is gated: accept its terms at {hub.url}/o/gated, .* HF_TOKEN"):
        pull("o/gated", folders=places, fits=fits)
    assert partial_models(places) == []  # nothing has come
    for name in ("o/private", "o/missing"):
        with pytest.raises(HubError, match=rf"has no {name}, .* at {hub.url}/{name}; .* HF_TOKEN"):
            pull(name, folders=places, fits=fits)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    for name in ("o/private", "o/gated"):
        assert pull(name, folders=places, fits=fits).size == 5000
    assert {request.token for request in hub.requests if request.path.startswith("/api/")} == {"", hub.token}
    assert {request.token for request in hub.contents()} == {""}  # another host never gets it
    assert {request.agent.partition("/")[0] for request in hub.requests} == {"headstart"}


def test_what_is_no_hub(hub: HubServer, places: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["o/n"] = HubRepo({"n-Q4_0.gguf": content(1, 5000)}, commit="../../main")
    with pytest.raises(HubError, match="does not answer like a hub; check HF_ENDPOINT"):
        pull("o/n", folders=places, fits=fits)
    with pytest.raises(ModelError, match="'llama3' is no name of a repository"):
        pull("llama3", folders=places)


def test_a_password_of_a_hub_is_never_shown(hub: HubServer, places: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["o/n"] = HubRepo({"n-Q4_0.gguf": content(1, 5000)})
    monkeypatch.setenv("HF_ENDPOINT", hub.url.replace("://", "://zoe7:p%40ss@"))
    assert pull("o/n", folders=places, fits=fits).size == 5000
    for address in (hub.url, "http://127.0.0.1:9"):
        monkeypatch.setenv("HF_ENDPOINT", address.replace("://", "://zoe7:p%40ss@"))
        with pytest.raises(HubError, match=r"HF_TOKEN|HF_ENDPOINT") as error:
            pull("o/missing", folders=places, fits=fits)
        assert not any(part in str(error.value) for part in ("zoe7", "p%40ss", "p@ss"))


@pytest.mark.parametrize(
    "address", ["zoe7:s3cret@host", "http:/zoe7:s3cret@host", "http://zoe7:s3c/ret@host", "http://host:abc", "ftp://host"]
)
def test_what_is_no_address_of_a_hub_is_not_quoted(address: str, places: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(HubError, match="HF_ENDPOINT is no address of a hub") as error:
        pull("o/n", folders=places, fits=fits)
    assert "s3c" not in str(error.value)


UNSAFE = [
    *("../n-Q4_0.gguf", "/etc/n-Q4_0.gguf", "a/../../n-Q4_0.gguf", "a//n-Q4_0.gguf", "./n-Q4_0.gguf", ".../n-Q4_0.gguf"),
    *("a\\..\\n-Q4_0.gguf", "C:n-Q4_0.gguf", "a\0n-Q4_0.gguf", "a\nn-Q4_0.gguf", "x" * 250 + "-Q4_0.gguf", " /n-Q4_0.gguf"),
    *("a\x9b-Q4_0.gguf", "a\u202e-Q4_0.gguf", "a\ud800-Q4_0.gguf"),
]


def test_no_name_leads_out_of_the_cache(hub: HubServer, places: Folders, tmp_path: Path) -> None:
    hub.repos["o/n"] = HubRepo({**dict.fromkeys(UNSAFE, content(1, 5000)), "ok-Q8_0.gguf": content(2, 5000)})
    assert pull("o/n", folders=places, fits=fits).name == "o/n:Q8_0"
    with pytest.raises(ModelError, match=r"has no 'Q4_0'; it has Q8_0 \([^,]*\)\.$"):
        pull("o/n:Q4_0", folders=places)
    for path in UNSAFE:
        with pytest.raises(HubError, match="not safe"):
            HubCache(places.hub, "o/n").link("f" * 40, path, "ab" * 32)
    assert {path.name for path in tmp_path.iterdir()} == {".cache", "state"}


def test_no_hash_leads_out_of_the_cache(hub: HubServer, places: Folders) -> None:
    digests: list[Any] = ["../../../x", "AB" * 32, "", "ab" * 31, None, 5]
    names = {f"n{number}-Q4_0.gguf": digest for number, digest in enumerate(digests)}
    hub.repos["o/n"] = HubRepo(dict.fromkeys(names, content(1, 5000)), small={*names}, digests=names)
    with pytest.raises(ModelError, match=r"no \.gguf file"):
        pull("o/n", folders=places, fits=fits)
    assert not places.hub.exists()


def test_no_link_in_the_cache_leads_out_of_it(hub: HubServer, places: Folders, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    hub.repos["o/n"] = HubRepo({"sub/n-Q4_0.gguf": content(1, 5000)})
    snapshot = HubCache(places.hub, "o/n").snapshot(hub.repos["o/n"].commit)
    snapshot.mkdir(parents=True)
    (snapshot / "sub").symlink_to(outside)
    with pytest.raises(HubError, match="leads out of"):
        pull("o/n", folders=places, fits=fits)
    assert not [*outside.iterdir()]


# ── folders in Hugging Face's form ───────────────────────────────────────────────────────────────────────────────────


MLX = "mlx-community/Tiny-4bit"


@pytest.fixture
def folder(hub: HubServer) -> HubRepo:
    files = hf_files()
    hub.repos[MLX] = HubRepo(files, small={name for name in files if not name.endswith(".safetensors")})
    return hub.repos[MLX]


def test_a_repository_without_gguf_is_fetched_as_a_folder(hub: HubServer, folder: HubRepo, places: Folders) -> None:
    model = pull(MLX, folders=places, fits=fits)
    assert (model.name, model.source, model.form) == (MLX, "headstart", "safetensors")
    assert {path.name: path.read_bytes() for path in model.path.iterdir()} == {
        name: data for name, data in folder.files.items() if name not in ("README.md", "code.py")
    }
    assert find(MLX, places, fits) == resolve(f"{MLX}:safetensors", folders=places, fits=fits) == model
    sent = hub.sent
    assert pull(MLX, folders=places, fits=fits) == model
    assert hub.sent == sent


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"architectures": ["BertModel"]}, "is no language model"),
        ({"model_file": "code.py"}, "Python code of its own"),
        pytest.param({"model_type": "nobody_knows"}, "does not know models of the kind", marks=pytest.mark.slow),  # loads MLX
    ],
)
def test_no_weights_of_what_cannot_be_served_are_fetched(
    config: dict[str, Any], why: str, hub: HubServer, folder: HubRepo, places: Folders
) -> None:
    folder.files |= hf_files(**config)
    with pytest.raises(ModelError, match=why) as refused:
        pull(MLX, folders=places, fits=fits)
    assert MLX in str(refused.value)
    assert hub.sent == len(folder.files["config.json"])
    assert partial_models(places) == []


def test_nothing_is_fetched_for_an_engine_that_is_not_installed(
    hub: HubServer, folder: HubRepo, places: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstart.engines.model_folder._ENGINE", "no_such_package")
    with pytest.raises(ModelError, match=rf"^{MLX} .*pip install 'headstart\[mlx\]'"):
        pull(MLX, folders=places, fits=fits)
    assert hub.sent == 0


def test_files_of_a_folder_that_is_not_complete_are_partial(
    hub: HubServer, folder: HubRepo, places: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstart.hub.progress._EVERY", 0.0)

    def report(progress: PullProgress) -> None:
        if progress.file.endswith("2-of-00002.safetensors"):
            raise Stop

    with pytest.raises(Stop):
        pull(MLX, report, places, fits)
    begun = partial_models(places)
    assert {one.name for one in begun} == {f"{MLX}:safetensors"}
    assert sum(one.size for one in begun) == hub.sent
    with pytest.raises(ModelError):
        find(MLX, places, fits)
    sent = hub.sent
    assert pull(f"{MLX}:safetensors", folders=places, fits=fits).path.is_dir()
    assert hub.sent == sent + 2000
    assert partial_models(places) == []
