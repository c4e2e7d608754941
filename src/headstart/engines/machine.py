"""Machine: the cores and the memory that this process may use, also in a container (Linux control groups)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

_GROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_MEMORY = (
    ("", ("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file")),
    ("memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)
"""For versions 2 and 1 of control groups: the controller, the limits, the bytes in use, and the cached files among them. Cached
files give way, so they count as free; otherwise the model's file, which was just read, would count twice. Above
`memory.high` the kernel slows a process down."""


def cores() -> int:
    """Physical cores."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [_read(group / "cpu.max") for group in _groups("")]
    quotas += [f"{_read(group / 'cpu.cfs_quota_us')} {_read(group / 'cpu.cfs_period_us')}" for group in _groups("cpu")]
    for quota, _, period in (found.partition(" ") for found in quotas):
        if quota.isdigit() and period.isdigit():
            allowed = min(allowed, max(1, round(int(quota) / int(period))))
    return min(allowed, psutil.cpu_count(logical=False) or allowed)


def memory(allowed: int | None = None) -> int:
    """Bytes that can be used without swapping; no more than `allowed`, if that is given."""
    free = int(psutil.virtual_memory().available)
    if allowed is not None:
        free = min(free, allowed)
    for controller, limits, usage, files in _MEMORY:
        for group in _groups(controller):
            found, used = [_read(group / limit) for limit in limits], _read(group / usage)
            most = min((int(limit) for limit in found if limit.isdigit()), default=None)
            if most is not None and used.isdigit():
                stat = dict(line.partition(" ")[::2] for line in _read(group / "memory.stat").splitlines())
                free = min(free, most - int(used) + sum(int(stat.get(name, 0)) for name in files))
    return max(0, free)


def _groups(controller: str) -> Iterator[Path]:
    """The control group of this process and all above it. In a container its own group may be the top."""
    for line in _read(_OWN).splitlines():
        _, controllers, own = line.split(":", 2)
        if controller in controllers.split(","):
            group = (root := _GROUPS / controller) / own.lstrip("/")
            yield from (place for place in (group, *group.parents) if place.is_relative_to(root))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
