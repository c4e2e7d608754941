"""Where ggml's work buffer begins, and that no bit of a result depends on it."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headstart.engines.llama import work_buffer
from headstart.engines.llama.binding import ready
from headstart.engines.llama.work_buffer import align

GLIBC = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "gnu_get_libc_version")
COMPILER = os.environ.get("CXX") or shutil.which("c++")
compiled = pytest.mark.skipif(not GLIBC or COMPILER is None, reason="another C library, or no compiler")

BACKEND = """
extern "C" char *take(unsigned long size) { return new char[size]; }
extern "C" void release(char *taken) { delete[] taken; }
"""
OTHER_NEW = """
#include <cstdlib>
void *operator new[](unsigned long size) { return std::malloc(size); }
void operator delete[](void *taken) noexcept { std::free(taken); }
"""
OTHER_MALLOC = """
// The least that glibc asks of one. What another allocator took ends the process.
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
struct Head { unsigned long size, ours; };
extern "C" void *malloc(size_t size) {
  void *at = mmap(nullptr, size + sizeof(Head), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return nullptr;
  *static_cast<Head *>(at) = {size, 4711};
  return static_cast<Head *>(at) + 1;
}
extern "C" void free(void *taken) { if (taken && (static_cast<Head *>(taken) - 1)->ours != 4711) abort(); }
extern "C" void *calloc(size_t count, size_t size) { return malloc(count * size); }
extern "C" void *realloc(void *taken, size_t size) {
  void *made = malloc(size);
  if (taken && made) {
    size_t before = (static_cast<Head *>(taken) - 1)->size;
    memcpy(made, taken, before < size ? before : size);
  }
  return made;
}
"""
TAKES = """
import ctypes, json, sys
from headstart.engines.llama import work_buffer
backend = ctypes.CDLL(sys.argv[1])
backend.take.restype, backend.take.argtypes = ctypes.c_void_p, [ctypes.c_ulong]
backend.release.argtypes = [ctypes.c_void_p]
functions = work_buffer._functions()
slots = [m.rights for m in work_buffer._mappings("libggml-cpu") for _ in m.find(functions[0])] if functions else []
before, aligned = backend.take(100_000), [work_buffer.align(), work_buffer.align()]
taken = [backend.take(size) for size in (1, 5_000, 900_000) for _ in range(20)]
for one in (before, *taken):
    backend.release(one)
print(json.dumps({"slots": slots, "aligned": aligned, "starts": [one % 4096 for one in taken]}))
"""
COMPUTES = """
import ctypes, json, sys
import numpy as np
from headstart.config import Settings
from headstart.engines.llama import LlamaEngine, work_buffer
kind, c, starts = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t), ctypes.CDLL(None), []
malloc, valloc = kind(("malloc", c)), kind(("valloc", c))

@kind
def take(size):
    found = valloc(size)
    while sys.argv[2] != "0" and found % 64 != int(sys.argv[2]):
        malloc(16)  # is lost, so that the next one begins elsewhere
        found = malloc(size)
    starts.append(found % 64)
    return found

found = work_buffer._functions()
work_buffer._functions = lambda: (found[0], work_buffer._address(take))
options = Settings(sys.argv[1], ctx=1024, slots=1, threads=2, memory_budget=0).engine_options()
engine = LlamaEngine.load(options, block_size=64)  # without a proof
tokens = np.random.default_rng(0).integers(1000, 2000, 479).astype(np.int32)
logits = []
for start, end in ((0, 448), (448, 478), (478, 479)):
    engine.prefill(0, tokens[start:end], logits=True)
    logits.append(engine.logits(0).tobytes().hex())
engine.close()
print(json.dumps({"starts": starts, "logits": logits}))
"""


def child(code: str, *arguments: str | Path, **environment: str) -> dict[str, list[int | str]]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, env={**os.environ, **environment}, check=True)
    found: dict[str, list[int | str]] = json.loads(ended.stdout)
    return found


def library(folder: Path, name: str, source: str, *flags: str) -> Path:
    assert COMPILER is not None
    (folder / f"{name}.cpp").write_text(source)
    command = [COMPILER, "-shared", "-fPIC", "-fno-builtin", f"{name}.cpp", *flags, "-o", f"{name}.so"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / f"{name}.so"


@pytest.mark.skipif(not GLIBC or "LD_PRELOAD" in os.environ, reason="another C library or allocator")
def test_this_build_takes_its_work_buffer_from_a_page_on() -> None:
    file = ready().library.folder / "libggml-cpu.so"
    if not file.is_file() or any(name not in file.read_bytes() for name in (b"_Znam", b"libstdc++.so.6")):
        pytest.skip("this build has its backend or C++'s library elsewhere")
    assert ready().aligned
    functions = work_buffer._functions()
    assert functions is not None
    new, aligned = functions
    mappings = [*work_buffer._mappings("libggml-cpu")]
    assert not any(mapping.find(new) for mapping in mappings)
    (slot,) = (slot for mapping in mappings for slot in mapping.find(aligned))
    take = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(ctypes.c_uint64.from_address(slot).value)
    assert take(884_864) % mmap.PAGESIZE == 0
    assert align(), "a second call finds it done"


@compiled
@pytest.mark.parametrize(("flags", "rights"), [(("-Wl,-z,norelro",), "rw-p"), (("-Wl,-z,now,-z,relro",), "r--p")])
def test_the_table_of_a_backend_is_changed(tmp_path: Path, flags: tuple[str, ...], rights: str) -> None:
    found = child(TAKES, library(tmp_path, "libggml-cpu-x", BACKEND, *flags))
    assert found == {"slots": [rights], "aligned": [True, True], "starts": [0] * 60}


@compiled
def test_other_libraries_are_left_alone(tmp_path: Path) -> None:
    found = child(TAKES, library(tmp_path, "libother", BACKEND))
    assert found["aligned"] == [False, False]
    assert any(found["starts"])


@compiled
@pytest.mark.parametrize("source", [OTHER_NEW, OTHER_MALLOC], ids=["new", "malloc"])
def test_another_allocator_is_left_alone(tmp_path: Path, source: str) -> None:
    """What one allocator took must not be freed by another."""
    backend, preloaded = library(tmp_path, "libggml-cpu", BACKEND), library(tmp_path, "allocator", source)
    found = child(TAKES, backend, LD_PRELOAD=str(preloaded))
    assert found["aligned"] == [False, False]
    assert any(found["starts"])


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(work_buffer, "_functions", lambda: pytest.fail("it looked for functions"))
    assert not align()


def test_a_system_without_proc_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ready()
    monkeypatch.setattr(work_buffer, "_MAPS", tmp_path / "maps")
    assert not align()


@pytest.mark.skipif(not GLIBC, reason="another C library")
def test_results_have_the_same_bits_wherever_the_work_buffer_begins(demo_model: Path) -> None:
    """Of calls that are computed in tiles, and token by token."""
    if not ready().aligned:
        pytest.skip("this build allocates its work buffer elsewhere")
    results = {behind: child(COMPUTES, demo_model, behind) for behind in ("0", "16")}
    for behind, result in results.items():
        assert {*result["starts"]} == {int(behind)}
    assert results["0"]["logits"] == results["16"]["logits"]
    assert len({*results["0"]["logits"]}) == 3
