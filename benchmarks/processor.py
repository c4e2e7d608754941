"""A caption for tables: the processor of the measurement, and how busy it was."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

from headstart.engines.llama import amx
from headstart.engines.llama.binding import lib, ready
from headstart.engines.llama.half_precision import computes_in_f16
from headstart.engines.llama.padding import ALIGNED, AMX_USED, COMPUTES_IN_F16, processor


def system() -> str:
    """The processor features that llama.cpp was built for."""
    return str(lib.llama_print_system_info().decode("utf-8", "replace"))


def name() -> str:
    """The processor's model, or the machine's type."""
    about = Path("/proc/cpuinfo")
    told = dict(re.findall(r"^(\w[\w ]*?)\s*: (.+)$", about.read_text(), re.MULTILINE)) if about.exists() else {}
    if "model name" not in told:
        return platform.processor() or platform.machine()
    numbers = (told[part] for part in ("cpu family", "model") if part in told)
    return f"{told['model name']} (family {', model '.join(numbers)})"


def found(*, engine: bool = True) -> set[str]:
    """Features of this build that it does not say itself. `engine`: headstart's is measured, so AMX counts if it works, and
    WITHOUT_AMX is not set (`benchmarks.servers`)."""
    used = engine and not os.environ.get("WITHOUT_AMX") and amx.works()
    features = {AMX_USED: used, COMPUTES_IN_F16: computes_in_f16(ready()), ALIGNED: ready().aligned}
    return {feature for feature, there in features.items() if there}


def caption(*, engine: bool = True) -> str:
    """Name, cores, class, and the current load of the machine."""
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    return f"{name()}, {os.cpu_count()} cores, class '{processor(system(), found(engine=engine)).name}'; load {load}"
