"""What `make site` adds to the pages in docs/: pages of the root folder, and a script that loads nothing from other hosts."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages of the root folder, and their names in the site."""
FOREIGN = re.compile(r"https://(?:unpkg\.com|api\.github\.com)/")
"""What the theme's script would load for old browsers, and for sites with other settings."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=_moved((ROOT / name).read_text("utf-8"))))
    engine = (ROOT / "examples" / "own_engine.py").read_text("utf-8")
    files.append(File.generated(config, "own_engine.md", content=f"# An engine of your own\n\n```python\n{engine}```\n"))
    return files


def _moved(text: str) -> str:
    """A page of the root folder with links that are right in docs/."""
    text = text.replace("](docs/", "](").replace("](examples/own_engine.py)", "](own_engine.md)")
    for name, page in PAGES.items():
        text = text.replace(f"]({name})", f"]({page})")
    return text


def on_post_build(config: MkDocsConfig) -> None:
    scripts = Path(config.site_dir) / "assets" / "javascripts"
    for script in scripts.rglob("*.js"):
        script.write_text(FOREIGN.sub("", script.read_text("utf-8")), "utf-8")
    for source in Path(config.site_dir).rglob("*.map"):
        source.unlink()
