"""Coverage: which branches of serving/ and tiers/ no history has taken. `unreached.tsv` has the known reasons."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[2]
REASONS = Path(__file__).with_name("unreached.tsv")
PACKAGES = ("serving", "tiers")
RARE = "rare"
"""A reason that begins like this is right whether the branch is reached or not."""


class Measured:
    """Measures from `start` to `stop`. It needs the package `coverage`."""

    def __init__(self) -> None:
        from coverage import Coverage

        self._coverage = Coverage(
            data_file=None, branch=True, concurrency="greenlet", include=[str(SOURCE / name / "*") for name in PACKAGES]
        )

    def start(self) -> None:
        self._coverage.start()

    def stop(self) -> None:
        self._coverage.stop()

    def report(self) -> str:
        """The share that was taken, a line for each branch without a known reason, and one for each reason that is wrong."""
        known = reasons()
        lines, taken, total, excused = list[str](), 0, 0, 0
        used = {(module, text) for module, text in known if text == "*"}
        for path in sorted(path for name in PACKAGES for path in (SOURCE / name).rglob("*.py")):
            module = str(path.relative_to(SOURCE))
            if (module, "*") in known:
                continue
            source = path.read_text("utf-8").splitlines()
            numbers = self._coverage._analyze(str(path)).numbers
            missing = self._coverage._analyze(str(path)).missing_branch_arcs()
            total += numbers.n_branches
            taken += numbers.n_branches - numbers.n_missing_branches
            for line, targets in sorted(missing.items()):
                text = source[line - 1].strip()
                if (module, text) in known:
                    used.add((module, text))
                    excused += len(targets)
                    continue
                to = ", ".join("end" if target < 0 else source[target - 1].strip()[:60] for target in targets)
                lines.append(f"{module}:{line}\t{text}\t→ {to}")
        wrong = [one for one in known if one not in used and not known[one].startswith(RARE)]
        share = f"branches reached: {taken:,} of {total:,}; {excused} not reached with a reason, {len(lines)} without"
        return "\n".join([share, *lines, f"reached, though listed: {len(wrong)}", *map("\t".join, wrong)])


def reasons() -> dict[tuple[str, str], str]:
    """Why branches are not reached, by module and the text of their line; `*` for a whole module."""
    found: dict[tuple[str, str], str] = defaultdict(str)
    for line in REASONS.read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            module, text, reason = line.split("\t")
            found[module, text] = reason
    return dict(found)
