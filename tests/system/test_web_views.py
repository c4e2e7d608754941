"""The views Cache, Requests and Figures in a real Chromium: what they show is what the server holds and says."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from browser import Visit, faults, is_wider_than_screen, watch
from headstart.api.auth import Keys
from headstart.config import Settings
from headstart.engines.llama import LlamaEngine
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from live import Server, idle, serving, wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

KEYS = {"operator": "sk-operator", "alice": "sk-alice", "bob": "sk-bob"}
SYSTEM = "You are the guide of a museum of ships. Answer in one short sentence, and name the hall in which a thing is. "
SECRET = "Bob keeps his secrets in the cellar, behind the third barrel."


@dataclass
class View:
    """A page of one server."""

    visit: Visit

    @property
    def page(self) -> Page:
        return self.visit.page

    def open(self, view: str) -> Page:
        self.page.goto(f"{self.visit.url}/#/{view}")
        self.page.wait_for_selector("h1")
        return self.page


@pytest.fixture
def opened(browser: Browser) -> Iterator[Any]:
    """Opens a page of a server. At its end nothing may be wrong, and nothing may have left the server."""
    every: list[Visit] = []

    def make(server: Server, key: str = "", **options: Any) -> View:
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 800}, "reduced_motion": "reduce", **options})
        if key:
            context.add_init_script(f"sessionStorage.setItem('headstart.key', {json.dumps(key)})")
        visit = Visit(context.new_page(), server.url)
        watch(visit, visit.page)
        every.append(visit)
        return View(visit)

    yield make
    for visit in every:
        visit.page.context.close()
        assert visit.errors == []
        assert visit.foreign == []


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server on the fake engine with keys and a disk."""
    folder = tmp_path_factory.mktemp("views")
    (folder / "keys").write_text("".join(f"{name} = {key}\n" for name, key in KEYS.items()))
    (folder / "keys").chmod(0o600)
    settings = Settings(memory_budget=1 << 20, cache_dir=folder / "cache")
    with (
        Runtime(lambda: FakeEngine(slots=2, ctx=2048), settings) as runtime,
        serving(runtime, wait=False, model_id="fake", api_keys=Keys((), folder / "keys")) as server,
    ):
        yield server


def expect(*of: Any) -> Any:
    from playwright.sync_api import expect  # here, because every run collects the tests

    return expect(*of)


def chat(server: Server, *words: str, key: str = "", system: str = SYSTEM, **more: Any) -> dict[str, Any]:
    """Asks; `words` are what user and model say in turns."""
    turns = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(words)]
    body = {"messages": [{"role": "system", "content": system}, *turns], "max_tokens": 12, "temperature": 0, **more}
    headers = {"authorization": f"Bearer {key}"} if key else {}
    answer = server.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.is_success, answer.text
    found: dict[str, Any] = answer.json()
    return found


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def stored(runtime: Runtime) -> None:
    """Waits until all is stored."""
    wait_until(lambda: idle(runtime) and not any(slot.dirty for slot in runtime.scheduler.slots))


# ── cache ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_tree_shows_the_branch_after_an_edited_message(fake: Server, opened: Any) -> None:
    assert fake.runtime is not None
    view = opened(fake, KEYS["alice"])
    page = view.open("cache")
    first = "Where is the anchor of the old barque, and how heavy is it?"
    reply = text_of(chat(fake, first, key=KEYS["alice"]))
    chat(fake, first, reply, "Who made it?", key=KEYS["alice"])
    stored(fake.runtime)
    page.get_by_role("tree").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("treeitem", selected=True)).to_contain_text("from 0 on")
    assert not any("branches follow" in row for row in page.get_by_role("treeitem").all_inner_texts())
    chat(fake, "What is in the hall of maps, and who drew them?", key=KEYS["alice"])
    stored(fake.runtime)
    expect(page.get_by_role("treeitem", selected=True)).to_contain_text("2 branches follow")
    shared = page.get_by_role("treeitem", selected=True).inner_text()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("treeitem", selected=True)).not_to_contain_text(shared)
    expect(page.locator(".chain-text")).to_contain_text("anchor")
    page.keyboard.press("ArrowDown")
    expect(page.locator(".chain-text")).to_contain_text("hall of maps")
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".chain-text")).to_contain_text("guide of a museum")
    tokens = page.evaluate("document.querySelector('.chain h2').textContent")
    assert shared.startswith(tokens)
    page.keyboard.press("Escape")
    expect(page.locator(".chain")).to_be_hidden()


def test_a_chain_is_pinned_and_deleted_after_a_question(fake: Server, opened: Any) -> None:
    assert fake.runtime is not None
    key, headers = KEYS["alice"], {"authorization": f"Bearer {KEYS['alice']}"}
    chat(fake, "Which flags hang in the last hall?", key=key, system="One flag. " * 12)
    stored(fake.runtime)

    def chains() -> dict[str, bool]:
        data = fake.http.get("/headstart/cache", headers=headers).json()["data"]
        return {chain["id"]: chain["pinned"] for chain in data}

    view = opened(fake, key)
    page = view.open("cache")
    page.get_by_role("tree").focus()
    expect(page.get_by_role("treeitem").last).to_be_attached()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("End")  # the latest chain
    while page.get_by_role("treeitem", selected=True).get_attribute("aria-expanded"):
        page.keyboard.press("ArrowRight")
    expect(page.locator(".chain-text")).to_be_visible()
    before = chains()
    assert not any(before.values())
    page.get_by_role("button", name="Pin").click()
    expect(page.get_by_role("button", name="Unpin")).to_be_visible()
    expect(page.get_by_role("button", name="Delete …")).to_be_disabled()
    expect(page.get_by_role("treeitem", selected=True)).to_contain_text("pinned")
    assert sum(chains().values()) == 1
    page.get_by_role("button", name="Unpin").click()
    expect(page.get_by_role("button", name="Delete …")).to_be_enabled()
    page.get_by_role("button", name="Delete …").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    assert chains() == before
    page.get_by_role("button", name="Delete …").click()
    expect(page.get_by_role("dialog")).to_contain_text("cannot be undone")
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(page.locator(".chain")).to_be_hidden()
    wait_until(lambda: len(chains()) == len(before) - 1)


RANDOM = """async ([seed, rounds]) => {
  const { CacheTree } = await import("/headstart/web/js/cache/tree.js");
  let state = seed;
  const random = (below) => (state = (state * 16807) % 2147483647) % below;
  const tree = new CacheTree();
  tree.apply("snapshot", { owner: "aa" });
  const items = new Map();
  const shape = (stretches) => stretches.map((one) => [
    one.first.id, one.id, one.start, one.stop, one.count, one.lanes, one.lane, one.below, one.last.pinned,
    one.checkpoints, shape(one.children),
  ]);
  for (let round = 0; round < rounds; round += 1) {
    const known = [...items.values()].filter((one) => !one.checkpoint);
    const what = random(10);
    const batch = [];
    if (what < 6 || !known.length) {
      const parent = known.length && random(8) ? known[random(known.length)] : null;
      const item = { id: `n${round}`, owner: random(5) ? "aa" : "bb", parent: parent?.id ?? null,
        start: parent ? parent.start + 8 : 0, tokens: 8, pinned: false, seconds_ago: null,
        tiers: random(2) ? { memory: true } : { disk: false } };
      batch.push(item);
      if (random(2)) batch.push({ ...item, id: `c${round}`, parent: item.id, checkpoint: true, start: item.start });
      if (random(2)) batch.reverse(); // a checkpoint may come before its block
    } else if (what < 8) {
      const all = [...items.values()];
      batch.push({ left: all[random(all.length)].id });
    } else {
      batch.push({ id: known[random(known.length)].id, tiers: { memory: true, disk: true }, pinned: random(2) === 1 });
    }
    for (const item of batch) {
      if ("left" in item) items.delete(item.left);
      else items.set(item.id, { ...items.get(item.id), ...item });
    }
    tree.apply("tree", batch);
    const fresh = new CacheTree();
    fresh.apply("snapshot", { owner: "aa" });
    fresh.apply("tree", [...items.values()]);
    const [one, other] = [JSON.stringify(shape(tree.stretches)), JSON.stringify(shape(fresh.stretches))];
    if (one !== other) return `round ${round}: ${one} is not ${other}`;
  }
  return tree.nodes.size;
}"""


@pytest.mark.parametrize("seed", [7919, 104_729, 1_299_709])
def test_a_tree_that_was_changed_is_like_a_new_one(fake: Server, opened: Any, seed: int) -> None:
    """Entries that come and leave in any order, checkpoints before their blocks, blocks before their parents."""
    assert opened(fake, KEYS["alice"]).open("figures").evaluate(RANDOM, [seed, 300]) > 50


SLOTS = """async () => {
  const { SlotStrip } = await import("/headstart/web/js/cache/slot_strip.js");
  const strip = new SlotStrip();
  const words = () => [...strip.element.children].map((one) => one.textContent);
  const idle = { slot: 1, state: "idle", tokens: 0 };
  strip.show([{ slot: 0, state: "prefill", tokens: 300, total: 1000, reply: 0, left: 11.2 }, idle]);
  const first = words();
  strip.show([{ slot: 0, state: "prefill", tokens: 0, total: 1000, reply: 0 }]);
  return [first, words()];
}"""


def test_a_slot_says_how_long_its_prefill_still_takes(fake: Server, opened: Any) -> None:
    """And a server that was started again with fewer slots has no more than these."""
    first, then = opened(fake, KEYS["alice"]).open("figures").evaluate(SLOTS)
    assert first == ["Slot 0computes the prompt: 300 of 1,000, 12 s left", "Slot 1empty"]
    assert then == ["Slot 0computes the prompt: 0 of 1,000"]


REFUSED = """async () => {
  const { watch } = await import("/headstart/web/js/feed.js");
  const ended = new AbortController();
  const said = await new Promise((say) => watch({ signal: ended.signal, say }, () => {}));
  ended.abort();
  return said;
}"""


def test_a_page_that_gets_no_place_says_so(fake: Server, opened: Any) -> None:
    """Fault: it stayed empty, as if nothing were stored."""
    page = opened(fake, KEYS["alice"]).open("figures")
    refusal = json.dumps({"error": {"message": "64 readers of events are the most. Close one."}})
    page.evaluate("body => { window.fetch = async () => new Response(body, { status: 429 }); }", refusal)
    assert page.evaluate(REFUSED) == "64 readers of events are the most. Close one."


LOGGED = """async (events) => {
  const { RequestLog, Timeline } = await import("/headstart/web/js/requests/request_log.js");
  const log = new RequestLog();
  for (const data of events) log.apply("requests", [data]);
  const line = new Timeline(log.latest, 1000);
  const phases = log.latest.map((row) => line.phases(row).map(({ name, from, to }) =>
    [name, Math.round(100 * from * line.length), Math.round(100 * to * line.length)]));
  return { parts: log.latest.map((row) => row.parts), phases, length: Math.round(100 * line.length), cuts: line.cuts.length };
}"""


def test_a_time_line_leaves_out_what_is_idle(fake: Server, opened: Any) -> None:
    first = {"number": 1, "id": "a", "owner": "", "choice": 0, "prompt": 100}
    seconds = {"queued": 0.5, "prefill": 2.0, "ttft": 2.5, "decode": 1.5}
    cost = {"cached": 60, "tiers": {"disk": 20}, "computed": 40, "completion": 9, "cause": "evicted", "recomputed": 30}
    over = {**cost, "seconds": seconds}
    events = [
        {**first, "state": "queued", "at": 10.0},
        {**first, "state": "length", "at": 14.0, **over},
        {**first, "number": 2, "state": "queued", "at": 990.0},
        {**first, "number": 2, "state": "prefill", "at": 992.0, "cached": 60, "tiers": {"memory": 50}},
    ]
    found = opened(fake, KEYS["alice"]).open("figures").evaluate(LOGGED, events)
    assert found["parts"][1] == {"slot": 40, "disk": 20, "computed": 10, "again": 30, "waiting": 0}
    assert found["parts"][0] == {"slot": 10, "memory": 50, "computed": 0, "again": 0, "waiting": 40}
    assert found["phases"][1] == [["queue", 0, 50], ["prefill", 50, 250], ["decode", 250, 400]]
    assert found["phases"][0] == [["queue", 475, 675], ["prefill", 675, 1475]], "until now"
    assert (found["length"], found["cuts"]) == (1475, 1)


def test_a_difference_is_marked_by_words(fake: Server, opened: Any) -> None:
    page = opened(fake, KEYS["alice"]).open("figures")
    code = """async ([one, other]) => {
      const { diff } = await import("/headstart/web/js/requests/text_diff.js");
      return diff(one, other).map((runs) => runs.map(({ text, same }) => (same ? text : `[${text}]`)).join(""));
    }"""
    both = page.evaluate(code, ["Monday, 3 March. A", "Tuesday, 4 March. A"])
    assert both == ["[Monday], [3] March. A", "[Tuesday], [4] March. A"]
    assert page.evaluate(code, ["", "new <b>"]) == ["", "[new <b>]"]
    assert page.evaluate(code, ["same 🙂", "same 🙂"]) == ["same 🙂", "same 🙂"]


GENERATED = """(count) => {
  let seed = 7;
  const random = () => (seed = (seed * 16807) % 2147483647) / 2147483647;
  const items = [];
  for (let at = 0; at < count; at += 1) {
    const back = random() < 0.9 ? 1 : 1 + Math.floor(random() * Math.min(at, 400));
    const parent = at && random() > 0.004 ? items[Math.max(0, at - back)] : null;
    const tiers = random() < 0.5 ? { memory: true } : { memory: true, disk: true };
    items.push({ id: `n${at}`, owner: "aa", parent: parent?.id ?? null, start: parent ? parent.start + 64 : 0, tokens: 64,
      tiers, pinned: false, seconds_ago: 1000 * random() });
  }
  return items;
}"""
MEASURED = """async (items) => {
  const { CacheTree } = await import("/headstart/web/js/cache/tree.js");
  const { layout, whole, zoomed } = await import("/headstart/web/js/cache/icicle.js");
  const tree = new CacheTree();
  tree.apply("snapshot", { owner: "aa" });
  const timed = (work) => { const began = performance.now(); const made = work(); return [performance.now() - began, made]; };
  const [taken] = timed(() => tree.apply("tree", items));
  const [made] = timed(() => tree.stretches);
  const boxes = [];
  let slowest = 0;
  let seen = whole(tree, 1160, 440);
  for (let step = 0; step < 24; step += 1) {
    const [time, found] = timed(() => layout(tree, seen));
    slowest = Math.max(slowest, time);
    boxes.push(found.length);
    seen = zoomed(seen, tree, 580, 220, 1.4, 1.4);
  }
  const nodes = tree.nodes.size;
  const lanes = tree.lanes;
  for (const item of items.toReversed()) tree.apply("tree", [{ left: item.id }]);
  return { taken, made, slowest, boxes, nodes, lanes, left: tree.stretches.length };
}"""
FRAMES = """(milliseconds) => new Promise((resolve) => {
  const frames = [];
  let last = performance.now();
  const end = last + milliseconds;
  const step = (now) => {
    frames.push(now - last);
    last = now;
    if (now < end) requestAnimationFrame(step);
    else resolve(frames.slice(1));
  };
  requestAnimationFrame(step);
})"""


def test_ten_thousand_entries_stay_smooth(fake: Server, opened: Any, capsys: pytest.CaptureFixture[str]) -> None:
    view = opened(fake, KEYS["alice"])
    page = view.open("figures")
    items = page.evaluate(GENERATED, 10_000)
    found = page.evaluate(MEASURED, items)
    assert found["nodes"] == 10_000
    assert found["left"] == 0
    assert max(found["boxes"]) <= 2_000, "what is small is grouped"
    assert found["boxes"][-1] <= 60
    chunks = [items[at : at + 500] for at in range(0, 10_000, 500)]
    events = [("snapshot", {"owner": "aa"}), *(("tree", chunk) for chunk in chunks), ("mark", {"time": 0})]
    body = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in events)
    calls = 0

    def once(route: Route) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            route.fulfill(body=body, content_type="text/event-stream")  # later calls wait for ever

    page.route("**/headstart/events", once)
    page.route("**/text?*", lambda route: route.fulfill(json={"text": "words of a stretch"}))
    page.goto(f"{fake.url}/#/cache")
    canvas = page.locator("canvas")
    expect(canvas).to_be_visible()
    expect(page.locator(".empty")).to_be_hidden()
    box = canvas.bounding_box()
    assert box is not None
    idle_frames = page.evaluate(FRAMES, 500)
    page.evaluate(f"window.measured = ({FRAMES})(3000)")
    page.mouse.move(box["x"] + 500, box["y"] + 200)
    page.keyboard.down("Control")
    for step in range(40):
        page.mouse.wheel(0, -60 if step < 20 else 60)
    page.keyboard.up("Control")
    page.mouse.down()
    for step in range(30):
        page.mouse.move(box["x"] + 500 - 8 * step, box["y"] + 200 - 4 * step)
    page.mouse.up()
    frames = page.evaluate("window.measured")
    page.get_by_role("button", name="Show all").click()
    page.unroute_all(behavior="ignoreErrors")
    middle = sorted(frames)[len(frames) // 2]
    with capsys.disabled():
        print(
            f"\n10,000 entries: events taken in {found['taken']:.1f} ms, stretches made in {found['made']:.1f} ms,"
            f" slowest layout {found['slowest']:.2f} ms, at most {max(found['boxes'])} boxes; frames while it moves:"
            f" median {middle:.1f} ms, slowest {max(frames):.0f} ms (at rest {max(idle_frames):.0f} ms)"
        )


# ── requests and figures ─────────────────────────────────────────────────────────────────────────────────────────────


def test_explain_shows_the_difference(fake: Server, opened: Any) -> None:
    key = KEYS["alice"]
    chat(fake, "When does it open?", key=key, system=f"Today is Monday. {SYSTEM}")
    chat(fake, "When does it open?", key=key, system=f"Today is Tuesday. {SYSTEM}")
    view = opened(fake, key)
    page = view.open("requests")
    row = page.get_by_role("row").filter(has_text="system_changed").first
    assert "computed again" in (row.get_by_role("img").get_attribute("aria-label") or "")
    row.get_by_role("button").click()
    expect(page.locator(".explanation")).to_contain_text("The system prompt differs.")
    expect(page.locator("mark.del").first).to_have_text("Monday")
    expect(page.locator("mark.ins").first).to_have_text("Tuesday")
    assert "/requests/" in page.url
    page.get_by_role("button", name="Close").click()
    expect(page.locator(".explanation")).to_be_hidden()
    page.go_back()
    expect(page.locator("mark.ins").first).to_have_text("Tuesday")


def test_a_running_request_is_followed(fake: Server, opened: Any) -> None:
    view = opened(fake, KEYS["alice"])
    chat(fake, "And by day?", key=KEYS["alice"])
    page = view.open("requests")
    expect(page.get_by_role("row").nth(1)).to_be_visible()
    before = page.get_by_role("row").count()
    used = chat(fake, "And at night?", key=KEYS["alice"])["headstart"]
    expect(page.get_by_role("row")).to_have_count(min(21, before + 1))
    label = page.get_by_role("row").nth(1).get_by_role("img").get_attribute("aria-label")
    assert label is not None
    assert f"{used['live']} in the slot" in label or not used["live"]
    assert f"{used['computed'] - used['recomputed']} computed" in label
    assert page.get_by_role("row").nth(1).locator(".line .decode").count() == 1


def test_the_figures_are_those_of_the_server(fake: Server, opened: Any) -> None:
    operator = {"authorization": f"Bearer {KEYS['operator']}"}
    page = opened(fake, KEYS["operator"]).open("figures")
    cached = fake.http.get("/headstart/stats", headers=operator).json()["cached"]
    expect(page.locator(".big").first).to_contain_text(f"{cached:,}")
    expect(page.locator(".budget")).to_have_count(2)
    assert page.get_by_role("img").count() >= 6
    own = opened(fake, KEYS["alice"]).open("figures")
    mine = fake.http.get("/headstart/stats", headers={"authorization": f"Bearer {KEYS['alice']}"}).json()["cached"]
    assert mine <= cached
    expect(own.locator(".big").first).to_contain_text(f"{mine:,}")
    expect(own.locator(".figures-view")).to_contain_text("Your requests")
    expect(own.locator(".budget")).to_have_count(0)


def test_a_tenants_page_holds_no_byte_of_another(fake: Server, opened: Any) -> None:
    assert fake.runtime is not None
    alice, bob = KEYS["alice"], KEYS["bob"]
    view = opened(fake, alice)
    page = view.open("cache")
    chat(fake, SECRET, key=bob, system="Speak of barrels. " * 9)
    chat(fake, "What is in the garden?", key=alice)
    stored(fake.runtime)
    headers = {"authorization": f"Bearer {bob}"}
    foreign = {chain["id"] for chain in fake.http.get("/headstart/cache", headers=headers).json()["data"]}
    theirs = [entry for entry in fake.runtime.stored.entries() if entry.id.hex() in foreign]
    assert theirs
    read: list[str] = []

    def pass_on(route: Route) -> None:
        if route.request.url.endswith("/headstart/events"):  # it never ends; tests/api/test_events.py reads it
            route.continue_()
        else:
            answer = route.fetch()
            read.append(answer.text())
            route.fulfill(response=answer)

    page.route("**/headstart/**", pass_on)
    for name in ("cache", "requests", "figures"):
        page = view.open(name)
        page.wait_for_timeout(700)
        if name == "cache":
            expect(page.get_by_role("treeitem").first).to_be_attached()
            page.get_by_role("tree").focus()
            page.keyboard.press("ArrowDown")
            expect(page.locator(".chain-text")).to_be_visible()
        read.append(page.content())
    page.unroute_all(behavior="ignoreErrors")
    held = "".join(read)
    assert '"text":"' in held, "her own"
    for word in ("barrel", "secrets", bob, *foreign, *{entry.owner.hex() for entry in theirs}):
        assert word not in held


@pytest.mark.parametrize("name", ["cache", "requests", "figures"])
@pytest.mark.parametrize("width", [390, 1200])
def test_it_fits_and_has_no_serious_fault(fake: Server, opened: Any, name: str, width: int) -> None:
    page = opened(fake, KEYS["operator"], viewport={"width": width, "height": 800}).open(name)
    page.wait_for_timeout(600)
    assert not is_wider_than_screen(page)
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        assert faults(page) == []


# ── a real run ───────────────────────────────────────────────────────────────────────────────────────────────────────

GUIDE = """You are the guide of a museum of ships in an old harbour. Visitors ask about halls, ships and tools. Answer in one
short sentence, name the hall, and say what is near it. The halls: in the first hall are anchors, chains and bells; in
the second hall are maps, compasses and logs of long journeys; in the third hall stand three boats of fishermen, with
nets, lamps and baskets; in the fourth hall hang flags and sails, the largest of them forty feet high; in the yard
lies a barque of 1862, which visitors may enter in groups of eight. The café is between the second and the third hall.
The museum opens at nine and closes at five, on Sundays at four. Children under seven enter free. Photographs are
welcome, without flash. If you do not know, say so, and name the desk at the door."""
LOUD = GUIDE.replace("You are the guide of", "Today is Monday. You are the guide of")


@pytest.fixture(scope="module")
def museum(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The bundled model after some conversations: a long one, one whose second message was edited, and others."""
    folder = tmp_path_factory.mktemp("museum")
    settings = Settings(model="demo", ctx=2048, slots=2, threads=2, memory_budget=128 << 20, cache_dir=folder)
    with (
        Runtime(lambda: LlamaEngine.load(settings.engine_options(), block_size=64), settings) as runtime,
        serving(runtime, wait=False, model_id="demo") as server,
    ):
        long = ["Where are the bells?"]
        for question in ("And what is near them?", "Who may enter the barque?", "When does the museum close?"):
            long += [text_of(chat(server, *long, system=GUIDE, max_tokens=24)), question]
        chat(server, *long, system=GUIDE, max_tokens=24)
        chat(server, *long[:2], "Show me the way to the maps, please.", system=GUIDE, max_tokens=24)  # an edited message
        for question in ("May I take photographs?", "Is there a café, and where?", "How high is the largest sail?"):
            chat(server, question, system=GUIDE, max_tokens=24)
        chat(server, "May I take photographs?", system=LOUD, max_tokens=24)
        chat(server, "May I take photographs?", system=LOUD.replace("Monday", "Tuesday"), max_tokens=24)
        for question in ("Where are the sails?", "And the compasses?", "Are children free?", "Where is the desk?"):
            chat(server, *long, system=GUIDE, max_tokens=24)
            long += ["It is in the hall that you see before you.", question]
        chat(server, *long[:3], system=GUIDE, max_tokens=24)
        stored(runtime)
        yield server


def picture(page: Page, name: str, folder: Path) -> None:
    """Takes a picture of the page, for the docs if they are wanted: `make pictures`."""
    path = Path(os.environ.get("HEADSTART_PICTURES") or folder) / f"web-{name}.png"
    page.mouse.move(0, 0)
    page.screenshot(path=path, animations="disabled")
    assert path.stat().st_size < 150_000


def test_pictures_of_a_real_run(museum: Server, opened: Any, tmp_path: Path) -> None:
    view = opened(museum, viewport={"width": 1200, "height": 960})
    page = view.open("cache")
    expect(page.get_by_role("treeitem").first).to_be_attached()
    page.get_by_role("tree").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("treeitem", selected=True)).to_contain_text("from 0 on")
    for _ in range(20):
        if "branches follow" in page.get_by_role("treeitem", selected=True).inner_text():
            break
        page.keyboard.press("ArrowRight")
    expect(page.locator(".chain-text")).to_contain_text("museum of ships")
    expect(page.locator(".facts")).to_contain_text("Saves")
    chain = museum.http.get("/headstart/cache").json()["data"][0]
    assert museum.post(f"/headstart/cache/{chain['id']}/pin").is_success
    page.evaluate("document.activeElement.blur()")
    page.wait_for_timeout(2500)
    picture(page, "cache", tmp_path)
    page = view.open("requests")
    page.get_by_role("row").filter(has_text="system_changed").first.get_by_role("button").click()
    expect(page.locator("mark.del").first).to_have_text("Monday")
    expect(page.locator("mark.ins").first).to_have_text("Tuesday")
    page.evaluate("document.activeElement.blur()")
    picture(page, "requests", tmp_path)
    page.set_viewport_size({"width": 1200, "height": 1150})
    page = view.open("figures")
    stats = museum.http.get("/headstart/stats").json()
    expect(page.locator(".big").first).to_contain_text(f"{stats['cached']:,}")
    assert stats["cached"] > stats["computed"]
    picture(page, "figures", tmp_path)
