"""The page with the bundled model: bars say what the server says, branches cost little, and a killed server is no end.

With HEADSTART_PICTURES the pictures of the docs are made from this run: `make pictures`.
"""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import pytest

from browser import Visit, visiting
from live import wait_until
from process import SHARED, serving
from stores import free_port

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.slow]

SYSTEM = "You are a helpful assistant. Answer in plain English, and be brief. " + "Use short sentences and simple words. " * 40


# Playwright keeps no body of a stream, so the page reads it twice.
TWICE = """() => {
  const ask = window.fetch;
  window.answers = [];
  window.fetch = async (path, options) => {
    const answer = await ask(path, options);
    if (!path.includes("chat/completions") || !answer.ok) return answer;
    const [one, other] = answer.body.tee();
    window.answers.push(new Response(other).text());
    return new Response(one, { headers: answer.headers });
  };
}"""


def last_answer(visit: Visit) -> dict[str, Any]:
    """The last object of the stream that the page has read last: it has the usage."""
    text: str = visit.page.evaluate("window.answers.at(-1)")
    lines = [line for line in text.splitlines() if line.startswith("data: {")]
    found: dict[str, Any] = json.loads(lines[-1][6:])
    return found


def bar(visit: Visit, number: int = -1) -> dict[str, int]:
    """The words of the bar below a reply, as numbers."""
    words = visit.page.locator(".message.assistant").nth(number).locator(".words li").all_inner_texts()
    pairs = [found for word in words if (found := re.fullmatch(r"\s*([a-z ]+?) ([\d,]+)", word))]
    return {found[1]: int(found[2].replace(",", "")) for found in pairs}


def check_bar(visit: Visit) -> dict[str, int]:
    """The bar says what the answer says. Returns what it says."""
    said, shown = last_answer(visit), bar(visit)
    usage, costs = said["usage"], said["headstart"]
    expected = {
        "prompt": usage["prompt_tokens"],
        "reply": usage["completion_tokens"],
        "slot": costs["live"],
        "computed": usage["prompt_tokens_details"]["cache_write_tokens"],
        **costs["tiers"],
    }
    assert shown == {name: tokens for name, tokens in expected.items() if tokens}
    assert sum(shown.get(name, 0) for name in ("slot", "memory", "disk")) == usage["prompt_tokens_details"]["cached_tokens"]
    widths = visit.page.locator(".message.assistant").last.locator(".origins span").evaluate_all(
        "(all) => all.map((one) => [one.className, Number(one.style.getPropertyValue('--share'))])"
    )
    assert dict(widths) == {name: tokens for name, tokens in shown.items() if name not in ("prompt", "reply")}
    return shown


def test_chat_edit_switch_reload_kill_and_go_on(browser: Browser, tmp_path: Path) -> None:
    options = (*SHARED, "--port", str(free_port()), "--cache-dir", str(tmp_path / "cache"))
    size = {"width": 1280, "height": 860}
    with serving(*options) as server:
        url = server.address()
        context = visiting(browser, url, viewport=size, color_scheme="light")
        visit = context.__enter__()
        page = visit.page
        page.evaluate(TWICE)
        page.get_by_role("button", name="Settings").click()
        page.fill("[name=system]", SYSTEM)
        page.fill("[name=temperature]", "0")
        page.fill("[name=max_tokens]", "60")
        page.keyboard.press("Tab")
        page.get_by_role("button", name="Settings").click()

        visit.say("Name three rivers, as a list.")
        first = check_bar(visit)
        assert first["computed"] == first["prompt"] > 300
        visit.say("Which of them is the longest?")
        second = check_bar(visit)
        assert second["computed"] < 64
        visit.say("And which is the shortest?")
        check_bar(visit)
        before = visit.texts()

        page.locator(".message.user").nth(1).get_by_role("button", name="Edit").click()
        page.fill(".edit textarea", "Write a Python function that prints them.")
        page.click("text=Send as a branch")
        page.wait_for_selector(".branches")
        visit.wait_for_reply()
        edited = check_bar(visit)
        assert edited["computed"] < 100, "an edit computes from the place of the change"
        picture(visit, "web-chat.png")
        page.get_by_role("button", name="Previous branch").click()
        assert visit.texts() == before
        page.get_by_role("button", name="Next branch").click()
        page.wait_for_timeout(300)
        page.reload()
        page.evaluate(TWICE)
        page.wait_for_selector(".message:nth-child(4)")
        assert len(visit.texts()) == 4
        stored(url)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait(60)
        page.fill(".composer textarea", "Are you there?")
        page.keyboard.press("Enter")
        page.wait_for_selector(".note.bad")
        page.wait_for_selector("#banner:not([hidden])")
    with serving(*options) as server:
        assert server.address() == url
        page.wait_for_selector("#banner", state="hidden")
        page.get_by_role("button", name="Try again").click()
        page.wait_for_selector(".note.bad", state="detached")
        visit.wait_for_reply()
        after = check_bar(visit)
        assert after["disk"] > 256
        assert after["computed"] < 200
        picture(visit, "web-chat-dark.png", colors="dark")
        # Every token of an earlier reply was changed: what was computed before is computed again, and the page says why.
        page.get_by_role("button", name="Settings").click()
        page.fill("[name=system]", "Today is Monday. " + SYSTEM)
        page.keyboard.press("Tab")
        visit.say("What day is it?")
        check_bar(visit)
        page.wait_for_selector("text=because the system prompt differs; to avoid it, ")
        told = page.locator(".again").last.inner_text()
        cost = last_answer(visit)["headstart"]
        assert f"Computed again: {cost['recomputed']:,} tokens" in told
        assert all(word in told for word in re.findall(r"\w{4,}", cost["hint"].lower()))
        down = re.compile("ERR_CONNECTION|status of 503 .*/health$")  # while the server was away, and while it loaded
        own = [line for line in visit.errors if not down.search(line)]
        assert own == visit.foreign == []
        context.__exit__(None, None, None)


def stored(url: str) -> None:
    """Waits until the disk has most of a conversation."""
    def found() -> int:
        chains = httpx.get(f"{url}/headstart/cache").json()["data"]
        return max((chain["tiers"].get("disk", 0) for chain in chains), default=0)

    wait_until(lambda: found() > 256, 60)


def picture(visit: Visit, name: str, colors: Any = "light") -> None:
    """A picture for the docs, if they are wanted. It has no address of this machine."""
    if folder := os.environ.get("HEADSTART_PICTURES"):
        assert urlsplit(visit.page.url).hostname == "127.0.0.1"
        visit.page.emulate_media(color_scheme=colors, reduced_motion="reduce")
        visit.page.locator(".scroll").evaluate("(one) => { one.scrollTop = one.scrollHeight; }")
        visit.page.evaluate("document.activeElement?.blur()")
        path = Path(folder) / name
        visit.page.screenshot(path=path)
        assert path.stat().st_size < 150_000
        visit.page.emulate_media(color_scheme="light")
