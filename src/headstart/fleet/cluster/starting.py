"""Starting: why a process of a fleet does not start, from its machine to the terminal. Ray carries texts of errors only."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager

from headstart.errors import ConfigError, HeadstartError

_REASON = re.compile(r"^headstart\.errors\.ConfigError: (on .+)$", re.MULTILINE)


@contextmanager
def reasoned() -> Iterator[None]:
    """Around a constructor that Ray calls: an error becomes one line with the machine's name, for `reason_in`."""
    try:
        yield
    except Exception as error:
        why = error.with_flags if isinstance(error, HeadstartError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"on {platform.node()}: {' '.join(why.split())}") from error


def reason_in(report: str) -> str | None:
    """The reason in what Ray reports about processes that did not start; None if Ray has another one."""
    found = _REASON.findall(report)
    return found[-1] if found else None
