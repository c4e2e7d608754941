"""The page in a real Chromium: its modules, the chat with scripted replies, hostile texts, keys, and what axe-core finds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from browser import Visit, faults, is_wider_than_screen, visiting, watch
from headstart.config import Settings
from headstart.explain.causes import CAUSES
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine, FakeTokenizer
from live import Server, serving
from scripted import Scripted

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SIZE = 200_000
"""Characters of a text that is made to be slow."""
WIDE = {"width": 1280, "height": 860}
PHONE = {"width": 360, "height": 720}


@contextmanager
def scripted(*replies: str, delay: float = 0.0, **options: Any) -> Iterator[tuple[Server, Scripted]]:
    """A server of a model that gives these replies, in pieces of at most 2,000 characters, and then says nothing of its own."""
    pieces = {reply[at : at + 2000] for reply in replies for at in range(0, len(reply), 2000) if len(reply) > 2000}
    tokenizer = FakeTokenizer(sorted(pieces))
    engine = Scripted(FakeEngine(slots=2, ctx=16384, delay=delay, tokenizer=tokenizer), [])
    for reply in replies:
        cut = [reply[at : at + 2000] for at in range(0, len(reply), 2000)]
        engine.say([token for piece in cut for token in tokenizer.tokenize(piece)])
    runtime = Runtime(lambda: engine, Settings(memory_budget=64 << 20))
    with runtime, serving(runtime, model_id="fake", **options) as server:
        yield server, engine


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    """A page whose modules can be imported."""
    with scripted() as (server, _), visiting(browser, server.url) as visit:
        yield visit.page


def called(page: Page, module: str, code: str, value: Any = None) -> Any:
    """What a piece of JavaScript returns. It sees the module as `m`, and the value as `v`."""
    return page.evaluate(f"async (v) => {{ const m = await import('/headstart/web/js/{module}.js'); {code} }}", value)


# ── Markdown ─────────────────────────────────────────────────────────────────────────────────────────────────────────


NO_LINKS = (
    *("[a](javascript:alert(1))", "[b](data:text/html,x)", "[c](/d)", "[d](vbscript:x)"),
    *("[a](JaVaScRiPt:x)", "[b](java\tscript:x)", "![c](javascript:x)", "[d](//e.example)"),
)


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("one\ntwo\n\nthree", "<p>one\ntwo</p><p>three</p>"),
        ("# A *b*\n###### C", "<h3>A <em>b</em></h3><h6>C</h6>"),
        ("**a** __b__ *c* _d_", "<p><strong>a</strong> <strong>b</strong> <em>c</em> <em>d</em></p>"),
        ("***e*** ~~f~~", "<p><strong><em>e</em></strong> <del>f</del></p>"),
        ("2 * 3 * 4, snake_case_name, **open", "<p>2 * 3 * 4, snake_case_name, **open</p>"),
        (r"\*a\* \` \[x](y)", "<p>*a* ` [x](y)</p>"),
        ("`a*b*` `` c`d `` `open", "<p><code>a*b*</code> <code>c`d</code> `open</p>"),
        ("- a\n  - b\n\n  c\n- d", "<ul><li><p>a</p><ul><li><p>b</p></li></ul><p>c</p></li><li><p>d</p></li></ul>"),
        ("3. a\n4. b\n\nin\n1999. we", '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol><p>in\n1999. we</p>'),
        ("> a\n> > b\n\nc", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><p>c</p>"),
        ("---\n***", "<hr><hr>"),
        ("<script>x()</script> <b>y</b> &amp;", "<p>&lt;script&gt;x()&lt;/script&gt; &lt;b&gt;y&lt;/b&gt; &amp;amp;</p>"),
        *((text, f"<p>{text}</p>") for text in NO_LINKS),
        ("[c](&#106;avascript:x)", "<p>[c](&amp;#106;avascript:x)</p>"),
    ],
)
def test_markdown_becomes_these_elements(page: Page, text: str, inside: str) -> None:
    code = "const view = new m.MarkdownView(); view.update(v, true); return view.element.innerHTML"
    assert called(page, "chat/markdown_view", code, text) == inside


@pytest.mark.parametrize(
    ("text", "href", "shown"),
    [
        ("[a **b**](https://x.example/c_(d) \"title\")", "https://x.example/c_(d)", "a b"),
        ("see https://x.example/a?b=c.", "https://x.example/a?b=c", "https://x.example/a?b=c"),
        ("[mail](mailto:a@x.example)", "mailto:a@x.example", "mail"),
        ("![a picture](https://x.example/p.png)", "https://x.example/p.png", "a picture"),
        ("[https://y.example](https://x.example)", "https://x.example", "https://y.example"),
    ],
)
def test_links_lead_to_the_web_only_and_take_nothing_along(page: Page, text: str, href: str, shown: str) -> None:
    code = """const view = new m.MarkdownView(); view.update(v, true);
        return [...view.element.querySelectorAll("a, img")].map(
          (a) => [a.tagName, a.getAttribute("href"), a.textContent, a.rel, a.target, a.title])"""
    assert called(page, "chat/markdown_view", code, text) == [["A", href, shown, "noopener noreferrer", "_blank", href]]


def test_tables_and_code(page: Page) -> None:
    text = "| a | b | c |\n|:--|:-:|--:|\n| 1 | `x` | 3 | 4 |\n| \\| |\n\n```py x\n# <i>\n```\n````\n```\n````\n```\nopen"
    blocks = called(page, "markdown", "return m.parse(v)", text)
    assert blocks[0]["align"] == ["left", "center", "right"]
    assert blocks[0]["rows"] == [[["1"], [{"kind": "code", "text": "x"}], ["3"]], [["|"], [], []]]
    assert [(block["language"], block["text"]) for block in blocks[1:]] == [("py", "# <i>"), ("", "```"), ("", "open")]


SLOW = [
    "a", "*", "**a ", "*a ", "_a_ ", "`", "` ``", "`a", "[", "[a](", "](", '[a](b "', "![", "~~", "https://", "https://a ", "|",
    "|a", "- ", "> ", ">", "* a\n", "- a\n  ", "1. ", "    ", "\n", "|a|b|\n", "\\", "***a** b* ", "<div>", "```\n", "#",
    "# \n", "---\n", "a\n|-|\n", "*a **b ", "  - a\n",
]  # fmt: skip


@pytest.mark.parametrize("piece", [*SLOW, "|a|b|\n|-|-|\n" + "|1|2|\n", "[a](x" + " " * 1000, "# " + " " * 1000])
def test_no_text_makes_it_slow(page: Page, piece: str) -> None:
    """Each would take minutes if the time grew with the square of the length; the test then reaches its time limit."""
    text = piece * (SIZE // len(piece))
    code = """const view = new m.MarkdownView();
        for (const end of [0.5, 1]) view.update(v.slice(0, v.length * end), end === 1);
        return view.element.textContent.length"""
    assert called(page, "chat/markdown_view", code, text) >= 0


def test_what_grows_is_shown_as_what_is_complete(page: Page) -> None:
    text = (
        "# Title\n\ntext *with* emphasis\nand `code`\n\n- one\n- two\n\n  more\n- three\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n"
        "```js\nlet a = 1;\n\nlet b;\n```\n\n> quoted\n> > twice\n\n1. x\n2. y\n\nlast **line**"
    )
    code = """const whole = new m.MarkdownView(); whole.update(v, true);
        const grown = new m.MarkdownView(); for (let end = 1; end <= v.length; end++) grown.update(v.slice(0, end), false);
        return [whole.element.innerHTML, grown.element.innerHTML]"""
    whole, grown = called(page, "chat/markdown_view", code, text)
    assert grown == whole


def test_only_the_last_block_is_made_anew(page: Page) -> None:
    code = """const view = new m.MarkdownView(); view.update("one\\n\\ntwo", false); const first = view.element.firstChild;
        view.update("one\\n\\ntwo and\\n\\nthree", false);
        return first === view.element.firstChild && view.element.children.length === 3"""
    assert called(page, "chat/markdown_view", code) is True


def test_a_huge_table_is_cut(page: Page) -> None:
    text = "|a|b|\n|-|-|\n" + "|1|2|\n" * 30_000
    (table,) = called(page, "markdown", "return m.parse(v)", text)
    assert (len(table["rows"]), table["left"]) == (5000, 25_000)


# ── other modules ────────────────────────────────────────────────────────────────────────────────────────────────────

TREE = """
const c = m.create({ ...m.USUAL, system: "S" }, 1);
const said = () => m.path(c).map((one) => one.content).join(" ");
const put = (role, content) => m.add(c, m.path(c).at(-1)?.id ?? "", { role, content }, 10);
const [u1, a1, u2, a2] = [put("user", "u1"), put("assistant", "a1"), put("user", "u2"), put("assistant", "a2")];
"""


def test_a_conversation_is_a_tree(page: Page) -> None:
    code = TREE + """
        const seen = [said()];
        const edited = m.edit(c, u2.id, "u2b"); seen.push(said());
        m.add(c, edited.id, { role: "assistant", content: "a2b" }); seen.push(said());
        seen.push(m.branches(c, u2.id).map((one) => one.content).join());
        m.turn(c, edited.id, -1); seen.push(said());
        m.turn(c, u2.id, -1); seen.push(said());
        m.edit(c, a1.id, "a1b"); seen.push(said());
        m.turn(c, m.path(c)[1].id, -1); seen.push(said());
        return seen"""
    first, second = "u1 a1 u2 a2", "u1 a1 u2b"
    assert called(page, "conversation", code) == [
        *(first, second, f"{second} a2b", "u2,u2b", first, first, "u1 a1b", first),
    ]


def test_a_request_sends_replies_back_as_they_came(page: Page) -> None:
    code = TREE + """
        c.settings = { ...c.settings, temperature: 0, schema: '{"type":"object"}', tools: '[{"name":"f"}]' };
        a1.reasoning = "hm"; a1.calls = [{ id: "1", name: "f", arguments: "{}" }]; a1.content = "";
        const t = m.add(c, a1.id, { role: "tool", content: "42", answers: "1" });
        return m.body(c, t.id)"""
    body = called(page, "conversation", code)
    schema = {"name": "reply", "schema": {"type": "object"}, "strict": True}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert body == {
        "messages": [
            {"role": "system", "content": "S"},
            {"role": "user", "content": "u1"},
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
            {"role": "tool", "content": "42", "tool_call_id": "1"},
        ],
        "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": schema},
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_progress": True,
    }


def test_two_tabs_lose_nothing(page: Page) -> None:
    code = TREE + """
        const other = structuredClone(c);
        m.add(c, a2.id, { role: "user", content: "here" }, 20); m.add(other, a2.id, { role: "user", content: "there" }, 30);
        const both = m.merged(other, c);
        return [m.path(both).at(-1).content, m.branches(both, m.path(both).at(-1).id).map((one) => one.content)]"""
    assert called(page, "conversation", code) == ["here", ["here", "there"]]


def test_an_export_comes_back(page: Page) -> None:
    code = TREE + """
        m.edit(c, u2.id, "u2b"); m.turn(c, m.path(c).at(-1).id, -1);
        const [back] = m.imported(m.exported([c]));
        const shown = (one) => m.path(one).map((x) => [x.role, x.content]);
        const plain = (one) => [one.title, one.settings, shown(one), Object.keys(one.messages).length];
        return [plain(c), plain(back), back.id === c.id]"""
    before, after, same = called(page, "conversation", code)
    assert before == after
    assert not same


@pytest.mark.parametrize(
    "conversation",
    [
        {},
        {"messages": {"a" * 24: {"role": "user", "content": {"x": 1}, "parent": "b" * 24}}},
        {"messages": {"a" * 24: {"role": "root", "parent": ""}}, "chosen": {"": ["x"]}},
        {"messages": {"a" * 24: {"role": "user", "parent": "a" * 24}, "__proto__": {"role": "user"}}, "settings": {"model": 5}},
        {"messages": {"a" * 24: {"role": "user", "parent": "b" * 24}, "b" * 24: {"role": "user", "parent": "a" * 24}}},
        {"messages": None, "title": ["<script>"], "chosen": None, "created": "never"},
        {"messages": {"a" * 24: {"role": "assistant", "parent": "", "calls": [None, {"id": 1}], "state": "running"}}},
        {"messages": {"a" * 24: {"role": "assistant", "parent": "", "cost": {"tiers": {"x": "y"}, "prompt": "1"}}}},
    ],
)
def test_a_file_of_somebody_else_does_no_harm(page: Page, conversation: Any) -> None:
    text = json.dumps({"format": "headstart-conversations", "version": 1, "conversations": [conversation]})
    shown = called(page, "conversation", "const [c] = m.imported(v); return [m.path(c), c.settings, c.title]", text)
    for message in shown[0]:
        assert isinstance(message["content"], str)
        assert message.get("state") != "running"
    assert isinstance(shown[2], str)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": "x"}', '{"format": "headstart-conversations"}'])
def test_another_file_is_refused(page: Page, text: str) -> None:
    code = "try { m.imported(v); return '' } catch (error) { return error.message }"
    assert "no conversations" in called(page, "conversation", code, text)


def test_events_are_read_however_they_are_cut(page: Page) -> None:
    stream = ": hello\n\nevent: a\nid: 7\ndata: one\ndata: two\r\n\ndata:{\"x\":1}\n\nevent: lost\n\ndata: unfinished"
    code = """const bytes = new TextEncoder().encode(v), found = [];
        for (const size of [1, 3, bytes.length]) {
          const body = new ReadableStream({ start(c) {
            for (let at = 0; at < bytes.length; at += size) c.enqueue(bytes.slice(at, at + size));
            c.close();
          } });
          const all = []; for await (const one of m.events(new Response(body))) all.push([one.event, one.data, one.id]);
          found.push(all);
        }
        return found"""
    expected = [["a", "one\ntwo", "7"], ["message", '{"x":1}', "7"]]
    assert called(page, "api", code, stream) == [expected] * 3


def test_a_prompt_tells_how_long_it_will_take(page: Page) -> None:
    code = """const r = new m.Reply(0);
        const told = (processed, now) => {
          r.take({ prompt_progress: { total: 1000, cache: 200, processed, time_ms: now } }, now);
          return r.progress;
        };
        return [told(200, 100), told(400, 1000), told(600, 2000)].map((one) => one.left)"""
    first, second, third = called(page, "reply", code)
    assert first is None
    assert (second, third) == (pytest.approx(0.9 * 600 / 200), pytest.approx(1.9 * 400 / 400))


def test_a_reason_and_its_hint_are_one_sentence(page: Page) -> None:
    for meaning in CAUSES.values():
        cost = {"recomputed": 496, "seconds": 1.2, "what": meaning.what, "cause": "", "hint": meaning.hint.with_flags}
        told = called(page, "chat/cost_view", "return m.reason(v)", cost)
        assert told.startswith("Computed again: 496 tokens, 1.20 s, because ")
        assert "; to avoid it, " in told
        assert re.findall(r"[.](?= |$)", told) == ["."], told
    short = {"recomputed": 9, "seconds": None, "what": "", "cause": "system_changed", "hint": ""}
    assert called(page, "chat/cost_view", "return m.reason(v)", short) == "Computed again: 9 tokens, because system changed."


def test_elements_are_made_of_known_parts_only(page: Page) -> None:
    code = """const bad = [() => m.h("script"), () => m.h("iframe"), () => m.h("style"), () => m.s("foreignObject"),
          () => m.h("p", { onclick: "x" }), () => m.h("p", { srcdoc: "x" }), () => m.h("a", { href: "javascript:alert(1)" }),
          () => m.h("a", { href: " java\\nscript:x" })];
        return bad.map((make) => { try { make(); return "made"; } catch { return "refused"; } })"""
    assert set(called(page, "dom", code)) == {"refused"}


# ── the chat ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_chat_branches_and_reload(browser: Browser) -> None:
    replies = ("First **reply**.", "Second.", "After the edit.", "Again.")
    with scripted(*replies) as (server, engine), visiting(browser, server.url) as visit:
        page = visit.page
        visit.say("Hello")
        visit.say("More")
        assert visit.texts() == ["Hello", "First reply.", "More", "Second."]
        page.locator(".message.user").first.get_by_role("button", name="Edit").click()
        page.fill(".edit textarea", "Good evening")
        page.click("text=Send as a branch")
        page.wait_for_selector(".branches")
        visit.wait_for_reply()
        assert visit.texts() == ["Good evening", "After the edit."]
        assert page.locator(".branches").first.inner_text().split() == ["2", "/", "2"]
        page.get_by_role("button", name="Previous branch").click()
        assert visit.texts() == ["Hello", "First reply.", "More", "Second."]
        page.wait_for_timeout(300)  # the choice is kept
        page.reload()
        page.wait_for_selector(".message:nth-child(4)")
        assert visit.texts() == ["Hello", "First reply.", "More", "Second."]
        page.locator(".message.assistant").first.get_by_role("button", name="Edit").click()
        page.fill(".edit textarea", "What I would have said.")
        page.keyboard.press("Control+Enter")
        page.wait_for_selector("text=What I would have said.")
        assert visit.texts() == ["Hello", "What I would have said."]
        assert "edited" in page.locator(".message.assistant .who").inner_text()
        page.get_by_role("button", name="Previous branch").last.click()
        page.locator(".message.assistant").last.get_by_role("button", name="Regenerate").click()
        page.wait_for_selector(".message:last-child .branches")
        visit.wait_for_reply()
        assert visit.texts() == ["Hello", "First reply.", "More", "Again."]
        assert not engine.replies
        assert visit.foreign == visit.errors == []


def test_a_reply_goes_on_while_another_view_is_open_and_can_be_stopped(browser: Browser) -> None:
    with scripted("word " * 60, "word " * 399, delay=0.005) as (server, _), visiting(browser, server.url) as visit:
        page = visit.page
        page.fill(".composer textarea", "Talk")
        page.keyboard.press("Enter")
        page.wait_for_selector(".message.assistant .typing")
        page.click("text=Cache")
        page.wait_for_selector(".message", state="detached")
        page.click("text=Chat")
        visit.wait_for_reply()
        assert visit.texts()[1] == ("word " * 60).strip()
        page.fill(".composer textarea", "Talk on")
        page.keyboard.press("Enter")
        page.wait_for_selector(".message:nth-child(4) .markdown p")
        page.get_by_role("button", name="Stop").click()
        page.wait_for_selector("text=Stopped.")
        words = page.locator(".message:nth-child(4) .cost .words")
        words.wait_for()
        assert re.search(r"prompt [\d,]+.*(slot|memory) [\d,]+.*computed [\d,]+.*reply [\d,]+", words.inner_text(), re.DOTALL)
        assert page.get_by_role("button", name="Send", exact=True).is_enabled()
        assert visit.errors == []


def test_progress_of_a_long_prompt(browser: Browser) -> None:
    with scripted("Done.", delay=0.05) as (server, _), visiting(browser, server.url) as visit:
        visit.page.fill(".composer textarea", "word " * 800)
        visit.page.keyboard.press("Enter")
        visit.page.wait_for_selector(".status progress")
        told = re.compile(r"Reading the prompt: [\d,]+ of [\d,]+ tokens, .+ left")
        visit.page.locator(".status", has_text=told).wait_for()
        visit.page.get_by_role("button", name="Stop").click()
        visit.wait_for_reply()


def test_reasoning_is_folded_and_tools_wait_for_results(browser: Browser) -> None:
    arguments = '{"place":"<i>Rome</i>"}'
    chunks = [
        {"reasoning_content": "First I think."},
        {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "weather<b>", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]},
    ]
    lines = [json.dumps({"choices": [{"index": 0, "delta": chunk, "finish_reason": None}]}) for chunk in chunks]
    stream = "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"])
    bodies: list[Any] = []
    with scripted("It is warm.") as (server, _), visiting(browser, server.url) as visit:
        page = visit.page

        def answer(route: Any) -> None:
            bodies.append(route.request.post_data_json)
            if len(bodies) == 1:
                route.fulfill(status=200, content_type="text/event-stream", body=stream)
            else:
                route.continue_()

        page.route("**/v1/chat/completions", answer)
        visit.say("Weather?")
        thoughts = page.locator(".message.assistant .thoughts")
        assert not thoughts.locator("p").is_visible()
        thoughts.locator("summary").click()
        assert thoughts.locator("p").inner_text() == "First I think."
        assert page.locator(".call h3").inner_text() == "Calls weather<b>"
        assert json.loads(page.locator(".call code").inner_text()) == {"place": "<i>Rome</i>"}
        page.fill(".results textarea", "22 degrees")
        page.click("text=Send the results")
        page.wait_for_selector(".message.tool")
        visit.wait_for_reply()
        assert bodies[1]["messages"][1:] == [
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "First I think.",
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather<b>", "arguments": arguments}}],
            },
            {"role": "tool", "content": "22 degrees", "tool_call_id": "c1"},
        ]
        assert visit.texts()[-1] == "It is warm."


def test_settings_reach_the_server_and_stay(browser: Browser) -> None:
    with scripted('{"a": 1}') as (server, _), visiting(browser, server.url, viewport=WIDE) as visit:
        page, bodies = visit.page, []
        page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
        page.get_by_role("button", name="Settings").click()
        page.fill("[name=system]", "Be brief.")
        page.fill("[name=temperature]", "0.25")
        page.fill("[name=seed]", "7")
        page.fill("[name=schema]", "{")
        page.keyboard.press("Tab")
        assert page.locator("[name=schema]").get_attribute("aria-invalid") == "true"
        page.fill("[name=schema]", '{"type": "object"}')
        page.keyboard.press("Tab")
        visit.say("Give me JSON")
        body = bodies[-1]
        assert body["messages"][0] == {"role": "system", "content": "Be brief."}
        assert (body["temperature"], body["seed"]) == (0.25, 7)
        assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
        page.reload()
        page.wait_for_selector(".message")
        assert page.input_value("[name=system]") == "Be brief."


def test_conversations_are_listed_renamed_exported_deleted_and_imported(browser: Browser, tmp_path: Path) -> None:
    with scripted("One.", "Two.") as (server, _), visiting(browser, server.url, viewport=WIDE) as visit:
        page = visit.page
        visit.say("The first <b>conversation</b>")
        page.click("text=New chat")
        page.wait_for_selector(".hello:not([hidden])")
        visit.say("The second one")
        titles = page.locator(".titles .title")
        assert titles.all_inner_texts() == ["The second one", "The first <b>conversation</b>"]
        page.get_by_role("button", name="Rename").click()
        page.fill("dialog input", "Renamed")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=Renamed")
        with page.expect_download() as download:
            page.click("text=Export all")
        file = tmp_path / "all.json"
        download.value.save_as(file)
        assert len(json.loads(file.read_text("utf-8"))["conversations"]) == 2
        page.get_by_role("button", name="Delete").click()
        page.get_by_role("dialog").get_by_role("button", name="Delete").click()
        page.wait_for_selector("text=Renamed", state="detached")
        assert titles.all_inner_texts() == ["The first <b>conversation</b>"]
        page.set_input_files("input[type=file]", file)
        page.wait_for_selector("text=2 imported")
        assert sorted(titles.all_inner_texts()) == ["Renamed", "The first <b>conversation</b>", "The first <b>conversation</b>"]
        page.click("text=Renamed")
        page.wait_for_selector("text=Two.")
        assert visit.errors == visit.foreign == []


def test_two_tabs_see_the_same(browser: Browser) -> None:
    with scripted("One.", "Two.") as (server, _), visiting(browser, server.url) as visit:
        visit.say("Hello")
        other = Visit(visit.page.context.new_page(), server.url)
        watch(other, other.page)
        other.page.goto(visit.page.url)
        other.page.wait_for_selector("text=One.")
        other.say("From the other tab")
        visit.page.wait_for_selector("text=Two.")
        assert visit.texts() == other.texts() == ["Hello", "One.", "From the other tab", "Two."]
        assert visit.errors == other.errors == []


FULL = "IDBObjectStore.prototype.put = () => { throw new DOMException('full', 'QuotaExceededError'); };"


def test_a_browser_whose_disk_is_full_chats_on(browser: Browser) -> None:
    with scripted("One.", "Two.", "Three.") as (server, _), visiting(browser, server.url) as visit:
        page = visit.page
        visit.say("Before")
        page.evaluate(f"() => {{ window.works = IDBObjectStore.prototype.put; {FULL} }}")
        page.click("text=New chat")
        visit.say("Meanwhile")
        assert visit.texts() == ["Meanwhile", "Two."]
        assert page.locator(".titles .title").all_inner_texts() == ["Meanwhile", "Before"]
        page.wait_for_selector("text=This browser keeps nothing")
        page.evaluate("() => { IDBObjectStore.prototype.put = window.works }")
        visit.say("After")
        page.wait_for_selector("text=This browser keeps nothing", state="detached")
        page.reload()
        page.wait_for_selector("text=Three.")
        assert visit.texts() == ["Meanwhile", "Two.", "After", "Three."]
        assert visit.errors == []


def test_a_chat_goes_on_after_its_database_was_deleted(browser: Browser) -> None:
    with scripted("One.", "Two.") as (server, _), visiting(browser, server.url) as visit:
        page = visit.page
        visit.say("Before")
        session = page.context.new_cdp_session(page)
        session.send("Storage.clearDataForOrigin", {"origin": server.url, "storageTypes": "indexeddb"})
        visit.say("After")
        assert visit.texts() == ["Before", "One.", "After", "Two."]
        page.wait_for_selector("text=This browser keeps nothing")
        assert visit.errors == []


# ── hostile texts ────────────────────────────────────────────────────────────────────────────────────────────────────

MARKUP = (
    "<script>window.stolen = 1; fetch('http://evil.example/')</script><img src=x onerror='window.stolen=1'>"
    "<iframe src='http://evil.example/'></iframe><svg onload='window.stolen=1'><style>*{display:none}</style>"
    "<a href='javascript:window.stolen=1'>x</a><meta http-equiv=refresh content='0;url=http://evil.example/'>"
    "<form action='http://evil.example/'><button>x</button></form><link rel=stylesheet href='http://evil.example/x.css'>"
)
BAD = "script, img, iframe, style, form, link, meta, object, embed, [onload], [onerror], .markdown [style]"
HOSTILE = [
    MARKUP,
    f"# {MARKUP}\n\n- {MARKUP}\n\n> {MARKUP}\n\n| {MARKUP} |\n|---|\n| {MARKUP} |\n\n```{MARKUP}\n{MARKUP}\n```\n`{MARKUP}`",
    "[a](javascript:window.stolen=1) [b](JAVASCRIPT:window.stolen=1) [c](data:text/html,<script>window.stolen=1</script>) "
    "![d](http://evil.example/pixel.png) <http://evil.example/> [e](//evil.example/x) [f](vbscript:x) [g](blob:http://evil.example/x)",
    "![x](http://evil.example/x.png)\n\n[x]: http://evil.example/\n\n[x][x]\n\n<img src=http://evil.example/>",
    "```\n" * 3 + "**_~~`[![|\n|-|\n> - 1. # \\",
    "| a " * 63 + "|\n" + "|---" * 63 + "|\n" + ("| x " * 63 + "|\n") * 700,
    "x" * SIZE,
    "*a **b _c " * (SIZE // 11),
    "\u202e\u0000\u2028\ufeff" + "\u0301" * 2000 + "👩‍👩‍👧‍👦" * 50,
    "- " * 1000 + "\n" + "> " * 1000 + "\n" + "[" * 5000 + "(" * 5000,
    "</script></textarea></article></main>" * 20,
]


def test_hostile_texts_do_nothing_but_look_odd(browser: Browser) -> None:
    names = ["<img src=x onerror=window.stolen=1>"]
    with scripted(*HOSTILE) as (server, engine), visiting(browser, server.url, viewport=WIDE) as visit:
        page = visit.page
        for number, reply in enumerate(HOSTILE):
            page.click("text=New chat")
            page.wait_for_selector(".hello:not([hidden])")
            visit.say(f"{number} {MARKUP}")
            shown = page.locator(".message.assistant").last
            assert reply.strip()[:6] in shown.evaluate("(one) => one.textContent") or number not in (0, 6, 10)
            found = shown.evaluate(
                f"(one) => ({{bad: one.querySelectorAll('{BAD}').length,"
                " links: [...one.querySelectorAll('.markdown a')].map((a) => new URL(a.href).protocol)})"
            )
            assert found["bad"] == 0
            assert set(found["links"]) <= {"http:", "https:", "mailto:"}
        page.reload()
        page.wait_for_selector(".message")
        assert page.evaluate("window.stolen") is None
        assert visit.foreign == visit.errors == []
        assert page.locator(".titles li").count() == len(HOSTILE)
        assert page.locator("main script, main img, main iframe").count() == 0
        assert not engine.replies
    odd = "/#/chat/<script>/..%2f"
    with scripted("Hello.", aliases=names) as (server, _), visiting(browser, server.url, path=odd) as visit:
        visit.say("Hi")
        assert visit.page.evaluate("window.stolen") is None
        assert visit.errors == []


def test_the_policy_stops_what_the_code_would_let_through(browser: Browser) -> None:
    """The second line of defence works by itself."""
    with scripted() as (server, _), visiting(browser, server.url) as visit:
        refused = visit.page.evaluate(
            """async () => {
              const tried = [];
              const attempt = (run) => { try { run(); tried.push("done"); } catch (error) { tried.push(error.name); } };
              attempt(() => { document.body.innerHTML = "<b>x</b>"; });
              attempt(() => document.body.insertAdjacentHTML("beforeend", "<b>x</b>"));
              attempt(() => { document.createElement("script").text = "1"; });
              return [...tried, await fetch("http://127.0.0.1:9/").catch(() => "refused")];
            }"""
        )
        assert refused == ["TypeError", "TypeError", "TypeError", "refused"]
        assert any("Content Security Policy" in line for line in visit.errors)


# ── keys and a server that is away ───────────────────────────────────────────────────────────────────────────────────


def test_the_page_asks_for_the_key_and_keeps_it_for_the_tab(browser: Browser) -> None:
    key = "sécret-🔑-key"
    with scripted("Hello.", api_keys=[key]) as (server, _), visiting(browser, server.url) as visit:
        page = visit.page
        page.wait_for_selector("dialog")
        page.fill("dialog input", "wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=The server does not know this key.")
        page.fill("dialog input", key)
        page.keyboard.press("Enter")
        page.wait_for_selector("dialog", state="detached")
        visit.say("Hi")
        assert visit.texts() == ["Hi", "Hello."]
        assert not any("ecret" in address for address in [*visit.requests, page.url])
        assert page.evaluate("JSON.stringify(localStorage)") == "{}"
        page.reload()
        page.wait_for_selector(".message")
        assert page.locator("dialog").count() == 0
        other = page.context.new_page()
        other.goto(server.url)
        other.wait_for_selector("dialog")
        other.close()
        page.get_by_role("button", name="Forget the API key").click()
        page.wait_for_selector("dialog")


def test_without_a_key_nothing_is_sent_again_and_again(browser: Browser) -> None:
    with scripted("Hello.", api_keys=["secret"]) as (server, _), visiting(browser, server.url) as visit:
        visit.page.wait_for_selector("dialog")
        visit.page.keyboard.press("Escape")
        visit.page.wait_for_selector("dialog", state="detached")
        visit.page.fill(".composer textarea", "Hi")
        visit.page.keyboard.press("Enter")
        visit.page.wait_for_selector("dialog")
        visit.page.keyboard.press("Escape")
        visit.page.wait_for_selector("text=This server needs an API key")
        assert visit.page.get_by_role("button", name="Try again").is_visible()


def test_errors_of_the_server_are_shown(browser: Browser) -> None:
    with scripted("Hello.") as (server, _), visiting(browser, server.url) as visit:
        visit.page.fill(".composer textarea", "word " * 4000)
        visit.page.keyboard.press("Enter")
        visit.page.wait_for_selector(".note.bad")
        assert "--ctx" in visit.page.locator(".note.bad").inner_text()


# ── accessibility ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("colors", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_axe_finds_no_serious_fault(browser: Browser, colors: Any, size: Any) -> None:
    blocks = ("# Title", "`code` [link](https://x.example)", "| a |\n|---|\n| 1 |", "```py\nx = 1\n```", "> quote", "- item")
    look = {"viewport": size, "color_scheme": colors}
    with scripted("\n\n".join(blocks), "Other.") as (server, _), visiting(browser, server.url, **look) as visit:
        page, found = visit.page, {}
        found["empty"] = faults(page)
        visit.say("Hello")
        page.locator(".message.user").first.get_by_role("button", name="Edit").click()
        found["edit"] = faults(page)
        page.click("text=Send as a branch")
        page.wait_for_selector(".branches")
        visit.wait_for_reply()
        page.get_by_role("button", name="Previous branch").click()
        found["chat"] = faults(page)
        page.get_by_role("button", name="Settings").click()
        found["settings"] = faults(page)
        if size is PHONE:
            page.get_by_role("button", name="Settings").click()
            page.get_by_role("button", name="Conversations").click()
            found["list"] = faults(page)
        page.get_by_role("button", name="Delete").click()
        found["dialog"] = faults(page)
        page.keyboard.press("Escape")
        assert {name: faults for name, faults in found.items() if faults} == {}


@pytest.mark.parametrize("view", ["chat", "cache", "requests", "figures"])
@pytest.mark.parametrize("width", [320, 640], ids=["320 pixels", "200 percent"])
def test_every_view_fits(browser: Browser, view: str, width: int) -> None:
    """1280 pixels at 200 % have room for 640; 320 pixels are the least that guidelines ask for."""
    size = {"width": width, "height": 500}
    with scripted("A reply. " + "x" * 300) as (server, _), visiting(browser, server.url, viewport=size) as visit:
        visit.say("y" * 300)
        visit.page.evaluate(f"location.hash = '#/{view}'")
        visit.page.wait_for_selector(f"nav a[data-view={view}][aria-current]")
        visit.page.wait_for_selector("main > *")
        assert not is_wider_than_screen(visit.page)


def test_all_can_be_done_with_the_keyboard(browser: Browser) -> None:
    with scripted("Hello.", "Again.") as (server, _), visiting(browser, server.url, viewport=WIDE) as visit:
        page = visit.page
        page.wait_for_selector(".composer textarea:focus")
        page.keyboard.type("Hi")
        page.keyboard.press("Enter")
        visit.wait_for_reply()
        focused = "document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent.trim()"
        names = []
        page.evaluate("document.activeElement.blur()")
        for _ in range(40):
            page.keyboard.press("Tab")
            names.append(page.evaluate(focused))
        for name in ("Skip to the content", "Chat", "Figures", "New chat", "Settings", "Edit", "Regenerate", "Message"):
            assert name in names
        page.get_by_role("button", name="Regenerate").focus()
        page.keyboard.press("Enter")
        page.wait_for_selector("text=2 / 2")
        visit.wait_for_reply()
        assert visit.texts() == ["Hi", "Again."]
