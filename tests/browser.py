"""A real Chromium, for tests of the page. It is Debian's (`apt-get install chromium`), or the one that CHROMIUM names."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

MISSING = "These tests need Chromium: apt-get install chromium, or name a program with CHROMIUM=/path/to/it."
_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser until the block ends. Without one the test fails: a page that nobody has looked at is not tested."""
    from playwright.sync_api import sync_playwright  # here, because every run collects the tests

    program = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _PROGRAMS)), None)
    if program is None:
        pytest.fail(MISSING, pytrace=False)
    with sync_playwright() as playwright:
        # In a container Chromium runs as root, which its sandbox refuses.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Visit:
    """A page, and what happened on it.

    Attributes:
        requests: addresses that it asked for.
        errors: lines of its console, and exceptions.
    """

    page: Page
    url: str
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def foreign(self) -> list[str]:
        """Requests to others than the server."""
        own = urlsplit(self.url).netloc
        return [one for one in self.requests if urlsplit(one).netloc != own and not one.startswith("blob:")]

    def say(self, text: str) -> None:
        """Sends a message, and waits until its reply is complete."""
        self.page.fill(".composer textarea", text)
        self.page.keyboard.press("Enter")
        self.wait_for_reply()

    def wait_for_reply(self) -> None:
        self.page.wait_for_selector(".message.assistant:last-child:not([aria-busy])", timeout=60_000)

    def texts(self) -> list[str]:
        """The texts of the messages that are shown."""
        found: list[str] = self.page.locator(".message .body").all_inner_texts()
        return [text.strip() for text in found]


@contextmanager
def visiting(browser: Browser, url: str, *, path: str = "/", **options: Any) -> Iterator[Visit]:
    """The page in a browser profile of its own. A refusal by its own policy is an error."""
    context = browser.new_context(**options)
    page = context.new_page()
    page.set_default_timeout(15_000)
    visit = Visit(page, url)
    watch(visit, page)
    page.goto(url + path)
    yield visit
    context.close()


def watch(visit: Visit, page: Page) -> None:
    """Writes down what happens on a page."""

    def said(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            visit.errors.append(f"{message.text} {message.location.get('url', '')}")

    page.on("request", lambda request: visit.requests.append(request.url))
    page.on("console", said)
    page.on("pageerror", lambda error: visit.errors.append(str(error)))
    page.on("dialog", lambda dialog: visit.errors.append(f"dialog: {dialog.message}"))


def faults(page: Page) -> list[str]:
    """What axe-core finds on the page that is serious or critical."""
    if not page.evaluate("'axe' in window"):
        page.evaluate((files("axe_playwright_python") / "axe.min.js").read_text("utf-8"))
    found = page.evaluate("axe.run({resultTypes: ['violations']})")
    serious = [one for one in found["violations"] if one["impact"] in ("serious", "critical")]
    return [f"{one['id']}: {', '.join(node['html'][:200] for node in one['nodes'][:3])}" for one in serious]


def is_wider_than_screen(page: Page) -> bool:
    wider: bool = page.evaluate("document.scrollingElement.scrollWidth > innerWidth")
    return wider
