"""First load: an untested library is proved in a process of its own, before this process loads it.

A library with other structures than the binding declares may crash, hang or compute nonsense. The process (`trial`) checks its
structures, loads the model with the same options, and proves how KV and state are moved. If it crashes, or gives no sign for
too long, the library is refused with words. The proof of the model is stored as always (`proven`), so that this process need
not repeat it.

The result is stored too: that a build works, with any model, and that it failed with one model.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from blake3 import blake3

from headstart.engines.llama.identity import SOURCES
from headstart.engines.llama.library import BINDING, TESTED, LlamaLibrary, child_environment, choose
from headstart.engines.memo import recall, remember
from headstart.engines.options import EngineOptions
from headstart.errors import ConfigError, ModelError
from headstart.names import option

MEMO = "builds.json"
_TRIAL = "headstart.engines.llama.trial"
_SHARE = 0.5
"""Part of a first load's progress that the trial takes."""
_PATIENCE, _PATIENCE_A_GIB = 120.0, 20.0
"""Seconds without a sign of the trial, and more for each GiB of the model."""
_MOST = 256
_WORKS = "works"

LoadReport = Callable[[float], None]
_accepted: set[str] = set()
"""Builds that this process may load."""


def prove(
    options: EngineOptions,
    files: Sequence[Path],
    progress: LoadReport = lambda _: None,
    *,
    whole: bool = True,
    anew: bool = False,
    patience: float | None = None,
) -> LoadReport:
    """Proves an untested library with this model, unless an earlier load has done it. A tested library needs no proof.

    Args:
        files: of the model.
        progress: receives the progress, from 0 to 1.
        whole: load the model; otherwise only its vocabulary, which proves the library for this process only.
        anew: prove it even if the result is known.
        patience: seconds without a sign after which the trial is given up; None for a time that suits the model.

    Returns:
        The function that reports the rest of the progress.

    Raises:
        ConfigError: the library cannot be used.
        ModelError: the model cannot be used.
    """
    library = choose(options.llama_lib)
    if library.tested:
        return progress
    build = _digest(library.build, library.binding, SOURCES)
    if build in _accepted and not anew:
        return progress
    failed = _digest(build, *(str(part) for file in files for part in _look(file)))
    known = recall(options.state_dir, MEMO)
    if known.get(build) == _WORKS and not anew:
        _accepted.add(build)
        return progress
    if isinstance(words := known.get(failed), str) and not anew:
        raise ConfigError(f"{words} An earlier start found that out; `headstart doctor` tries it again.")
    if patience is None:
        patience = _PATIENCE + _PATIENCE_A_GIB * sum(file.stat().st_size for file in files) / (1 << 30)
    words = _tried(library, options, whole, patience, lambda share: progress(_SHARE * share))
    if words is None:
        _accepted.add(build)
    if whole:
        kept = {key: value for key, value in known.items() if key != failed and (key != build or words is None)}
        kept |= {build: _WORKS} if words is None else {failed: words}
        remember(options.state_dir, MEMO, dict(list(kept.items())[-_MOST:]))
    if words is not None:
        raise ConfigError(words)
    return lambda share: progress(_SHARE + (1 - _SHARE) * share)


def accept(options: EngineOptions) -> None:
    """Lets this process load the library without a trial, because it is the trial. Raises ConfigError if there is none."""
    library = choose(options.llama_lib)
    if not library.tested:
        _accepted.add(_digest(library.build, library.binding, SOURCES))


def _tried(library: LlamaLibrary, options: EngineOptions, whole: bool, patience: float, progress: LoadReport) -> str | None:
    """Runs the trial. None if the library works, else why it is refused. Raises ConfigError and ModelError of the trial."""
    with _trial({"options": _written(options), "whole": whole}) as (process, log):
        for line in _lines(process, patience):
            if line is None:
                return _refusal(library, f"gave no sign for {patience:.0f} seconds when this model was loaded with it")
            match line:
                case {"share": float(share)}:
                    progress(share)
                case {"error": {"kind": kind, "message": message}}:
                    raise (ModelError if kind == ModelError.__name__ else ConfigError)(message)
                case {"done": {"movable": True}}:
                    return None
                case {"done": {"notes": notes}}:
                    return _refusal(library, f"was not proved: {'; '.join(notes)}")
        code = process.wait()
        ended = f"crashed ({_signal(-code)})" if code < 0 else f"ended its process with code {code}"
        return _refusal(library, f"{ended} when this model was loaded with it{_last_words(log)}")


def _refusal(library: LlamaLibrary, what: str) -> str:
    return (
        f"The {library} {what}. Use the llama.cpp of a tested {BINDING} ({', '.join(TESTED)}), or build one from its sources "
        f"(vendor/llama.cpp) and name it in {option('llama_lib')}."
    )


@contextmanager
def _trial(request: dict[str, Any]) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """The process and the file that gets its stderr. The process ends with the block."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", _TRIAL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=child_environment()
        )
        try:
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(request).encode())
                process.stdin.close()
            except BrokenPipeError:
                pass  # it has crashed; its exit code says so
            yield process, log
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _lines(process: subprocess.Popen[bytes], patience: float) -> Iterator[dict[str, Any] | None]:
    """What the trial reports; None if there is nothing for too long, and then nothing more."""
    assert process.stdout is not None
    number, rest = process.stdout.fileno(), b""
    while select.select([number], [], [], patience)[0]:
        data = os.read(number, 1 << 16)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield json.loads(line)
    yield None


def _written(options: EngineOptions) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(options).items()}


def read(written: dict[str, Any]) -> EngineOptions:
    """The options of a trial's request. Without earlier proofs: it is the trial that proves."""
    paths = {name: Path(written[name]) for name in ("lora", "llama_lib", "state_dir") if written[name] is not None}
    return EngineOptions(**{**written, **paths, "together": tuple(written["together"]), "proofs": ()})


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_words(log: IO[bytes]) -> str:
    """The last line that the trial wrote to stderr, which names a failed assertion or the linker's complaint."""
    log.seek(0)
    lines = [line.strip() for line in log.read().decode("utf-8", "replace").splitlines() if line.strip()]
    return f": {lines[-1][:200].rstrip('.')}" if lines else ""


def _look(file: Path) -> tuple[Path, int, int]:
    status = file.stat()
    return file.resolve(), status.st_size, status.st_mtime_ns


def _digest(*parts: str) -> str:
    return blake3("\0".join(parts).encode()).hexdigest()
