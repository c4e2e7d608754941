"""The same runtime as the server's, in your own process.

    with headstart.open("model.gguf") as hs:
        chat = [{"role": "user", "content": "Name three rivers."}]
        first = hs.chat(chat)
        chat += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "Which is the longest?"}]
        for text in hs.chat(chat, stream=True):
            print(text, end="", flush=True)

The second call computes the new question only.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import queue
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict, Unpack, overload

from headstart.config import Settings, default_cache_dir
from headstart.errors import Cancelled, ConfigError, InvalidRequest
from headstart.names import suggesting, unknown
from headstart.prompt.builder import Prompt
from headstart.prompt.chat_template import Message, Template
from headstart.serving.request import Delta, Event, Failed, Finished, FinishReason, Progress, Report, Request, Sink
from headstart.serving.runtime import Handle, Runtime

if TYPE_CHECKING:
    from pydantic import BaseModel

    from headstart.library.options import Given

Messages = str | Sequence[Message]
"""A conversation; a bare text is one user message."""


class Options(TypedDict, total=False):
    """What `chat` and `complete` take by name. `Sampling` explains the sampling options and holds their defaults, but
    for those that `Settings` names.

    Attributes:
        max_tokens: most tokens of the reply; None for as many as the context holds; 0 only fills the cache.
        stop: texts that end the reply and are not part of it.
        salt: tenant; what one salt computed is never used for another.
        reuse: False computes the prompt anew, from nothing that is cached; what it computes is kept as any other's.
        json_schema: what the reply must be: a JSON schema, or a pydantic model, whose `model_validate_json` then takes the
            text.
        regex: the same, as a regular expression (of Rust) that the whole reply matches.
        grammar: the same, in llguidance's Lark. A reply that `max_tokens` or `stop` cuts off is only its beginning.
    """

    max_tokens: int | None
    stop: str | Sequence[str]
    salt: str
    reuse: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    penalty_last_n: int
    logit_bias: Mapping[int, float]
    seed: int | None
    json_schema: Mapping[str, Any] | type[BaseModel] | None
    regex: str | None
    grammar: str | None


class ChatOptions(Options, total=False):
    """What `chat` takes besides.

    Attributes:
        tools: in OpenAI's form.
        template: further variables for the chat template, as `{"enable_thinking": False}`.
    """

    tools: Sequence[Mapping[str, Any]]
    template: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """A complete reply.

    Attributes:
        text: without the end token, and without what `stop` named.
        finish_reason: `stop` or `length`.
        report: what was cached, restored and computed for it, and how long that took.
        tokens: what was sampled, the end token included.
    """

    text: str
    finish_reason: FinishReason
    report: Report
    tokens: tuple[int, ...]


class _Call:
    """A submitted request and what its events add up to, however they arrive."""

    _over = True  # until there is a request to cancel

    def __init__(self, submit: Callable[[Sink], Handle], put: Sink) -> None:
        self._put = put
        self._parts: list[str] = []
        self._reply: Reply | None = None
        self._handle = submit(put)
        self._over = False

    @property
    def reply(self) -> Reply:
        """The whole reply, once the stream has been read to its end. Raises RuntimeError before that, or if it never was."""
        if self._reply is None:
            raise RuntimeError("the stream was not read to its end")
        return self._reply

    def close(self) -> None:
        """Cancels the request at the next token or grid point, if it is not complete; its finished blocks are kept.

        Thread-safe: whoever waits for the next piece gets `Cancelled`.
        """
        if not self._over:
            self._over = True
            self._handle.cancel()
            self._put(Failed(Cancelled("the stream was closed")))

    def _take(self, event: Event) -> str:
        """The text that the event adds."""
        match event:
            case Delta(text=text):
                self._parts.append(text)
                return text
            case Finished(reason=reason, report=report, tokens=tokens):
                self._over, self._reply = True, Reply("".join(self._parts), reason, report, tokens)
            case Failed(error=error):
                self._over = True
                raise error
        return ""

    def __del__(self) -> None:
        self.close()


class Stream(_Call, Iterator[str]):
    """The pieces of a reply's text as they come; then `reply` is there.

    Leaving the loop early, `close()`, the end of a `with` block or dropping the stream cancels the request.
    """

    def __init__(self, submit: Callable[[Sink], Handle]) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        super().__init__(submit, self._events.put)

    def __next__(self) -> str:
        while not self._over:
            if text := self._take(self._events.get()):
                return text
        raise StopIteration

    def __iter__(self) -> Iterator[str]:
        try:
            while (text := next(self, None)) is not None:
                yield text
        finally:
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncStream(_Call, AsyncIterator[str]):
    """`Stream` for `async for` and `async with`."""

    def __init__(self, submit: Callable[[Sink], Handle]) -> None:
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def put(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                loop.call_soon_threadsafe(self._events.put_nowait, event)

        super().__init__(submit, put)

    async def __anext__(self) -> str:
        while not self._over:
            if text := self._take(await self._events.get()):
                return text
        raise StopAsyncIteration

    async def __aiter__(self) -> AsyncIterator[str]:  # a generator notices that its loop was left
        try:
            while (text := await anext(self, None)) is not None:
                yield text
        finally:
            self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class Headstart:
    """A loaded model. Thread-safe. `close` it, or use it as a context manager.

    Args:
        runtime: closed together with this; around an engine of one's own it is `Runtime(engine, Settings())`.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    @overload
    def chat(self, messages: Messages, *, stream: Literal[False] = False, **options: Unpack[ChatOptions]) -> Reply: ...
    @overload
    def chat(self, messages: Messages, *, stream: Literal[True], **options: Unpack[ChatOptions]) -> Stream: ...
    def chat(self, messages: Messages, *, stream: bool = False, **options: Unpack[ChatOptions]) -> Reply | Stream:
        """The reply to a conversation; with `stream`, piece by piece.

            reply = hs.chat([{"role": "user", "content": "Hello"}], max_tokens=50, temperature=0.0)
            print(reply.text, reply.report.cached, "of", reply.report.prompt, "tokens were cached")

            rivers = {"type": "array", "items": {"type": "string"}, "maxItems": 3}
            json.loads(hs.chat("Name three rivers.", json_schema=rivers).text)

        Raises:
            InvalidRequest: messages that the chat template refuses, options out of range, or a grammar that cannot be
                followed.
            ContextTooLong: the conversation exceeds the context.
            Overloaded: the queue is full.
            EngineError: the engine failed to compute.
            Unavailable: the runtime is closed.
        """
        return self._serve(self._chat(messages, dict(options)), stream)

    @overload
    def complete(self, text: str, *, stream: Literal[False] = False, **options: Unpack[Options]) -> Reply: ...
    @overload
    def complete(self, text: str, *, stream: Literal[True], **options: Unpack[Options]) -> Stream: ...
    def complete(self, text: str, *, stream: bool = False, **options: Unpack[Options]) -> Reply | Stream:
        """The continuation of a raw text, without a chat template.

            hs.complete("def fibonacci(n):", max_tokens=80, stop=["\\n\\n"]).text

        Raises what `chat` raises.
        """
        return self._serve(self._complete(text, dict(options)), stream)

    @overload
    async def achat(self, messages: Messages, *, stream: Literal[False] = False, **options: Unpack[ChatOptions]) -> Reply: ...
    @overload
    async def achat(self, messages: Messages, *, stream: Literal[True], **options: Unpack[ChatOptions]) -> AsyncStream: ...
    async def achat(self, messages: Messages, *, stream: bool = False, **options: Unpack[ChatOptions]) -> Reply | AsyncStream:
        """`chat` for asyncio.

            async for text in await hs.achat(messages, stream=True):
                print(text, end="", flush=True)

        Cancelling the task cancels the request.
        """
        return await self._aserve(lambda: self._chat(messages, dict(options)), stream)

    @overload
    async def acomplete(self, text: str, *, stream: Literal[False] = False, **options: Unpack[Options]) -> Reply: ...
    @overload
    async def acomplete(self, text: str, *, stream: Literal[True], **options: Unpack[Options]) -> AsyncStream: ...
    async def acomplete(self, text: str, *, stream: bool = False, **options: Unpack[Options]) -> Reply | AsyncStream:
        """`complete` for asyncio; cancelling the task cancels the request."""
        return await self._aserve(lambda: self._complete(text, dict(options)), stream)

    @suggesting
    def warm(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: Mapping[str, Any] | None = None,
        salt: str = "",
        progress: Callable[[int, int], None] | None = None,
    ) -> Report:
        """Computes ahead of time what every continuation of `messages` begins with, and keeps it like any other prompt.

            hs.warm([{"role": "system", "content": handbook}])

        Args:
            progress: told how many of how many tokens are in place, on the engine's thread.

        Raises what `chat` raises.
        """
        chat, tools, template = _canonical(messages, tools, template, self.runtime.prompter.template)
        request = Request(self.runtime.stem_prompt(chat, tools=tools, salt=salt, **template), max_tokens=0)
        events: queue.SimpleQueue[Finished | Failed] = queue.SimpleQueue()

        def put(event: Event) -> None:
            if isinstance(event, Progress) and progress is not None:
                progress(event.done, event.total)
            elif isinstance(event, Finished | Failed):
                events.put(event)

        self.runtime.submit(request, put)
        end = events.get()
        if isinstance(end, Failed):
            raise end.error
        return end.report

    def close(self) -> None:
        """Fails what is running, and frees the model. Idempotent."""
        self.runtime.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _chat(self, messages: Messages, options: dict[str, Any]) -> Request:
        from headstart.library.options import Given

        chat, tools, template = _canonical(
            messages, options.pop("tools", None), options.pop("template", None), self.runtime.prompter.template
        )
        checked = Given.of(options, beside=("stream", "tools", "template"))
        prompt = self.runtime.chat_prompt(chat, tools=tools, salt=checked.salt, spelled=checked.reuse, **template)
        return self._request(checked, prompt)

    def _complete(self, text: str, options: dict[str, Any]) -> Request:
        from headstart.library.options import Given

        if not isinstance(text, str):
            raise InvalidRequest(f"text must be a text, not {text!r:.100}.", param="text")
        checked = Given.of(options)
        return self._request(checked, self.runtime.text_prompt(text, salt=checked.salt, spelled=checked.reuse))

    def _request(self, checked: Given, prompt: Prompt) -> Request:
        option, grammar = checked.grammar_given()
        if grammar is not None:
            grammar = self.runtime.check_grammar(grammar, salt=prompt.salt, param=option)
        return checked.request(prompt, self.runtime.sampling, grammar)

    def _serve(self, request: Request, stream: bool) -> Reply | Stream:
        running = Stream(lambda sink: self.runtime.submit(request, sink))
        if stream:
            return running
        for _ in running:
            pass
        return running.reply

    async def _aserve(self, build: Callable[[], Request], stream: bool) -> Reply | AsyncStream:
        request = await asyncio.to_thread(build)  # a long new text takes a while to tokenise
        running = AsyncStream(lambda sink: self.runtime.submit(request, sink))
        if stream:
            return running
        try:
            async for _ in running:
                pass
        finally:
            running.close()
        return running.reply


def _canonical(
    messages: Messages, tools: Any, template: Any, source: Template
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None, dict[str, Any]]:
    """Messages, tools and template variables in the one canonical form, as over HTTP. Raises InvalidRequest."""
    from pydantic import ValidationError

    from headstart.chat.messages import Conversation, dialogue_of
    from headstart.chat.normalize import Ground, normalise
    from headstart.chat.reply_memory import Recall
    from headstart.chat.validation import condense

    said: Any = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    if isinstance(said, Iterable):
        said = [dict(one) if isinstance(one, Mapping) else one for one in said]
    talk = {
        "messages": said,
        "tools": list(tools) if isinstance(tools, tuple) else tools,
        "chat_template_kwargs": dict(template) if isinstance(template, Mapping) else template,
    }
    try:
        form = Conversation.model_validate(talk)
    except ValidationError as error:
        raise condense(error, talk) from None
    dialogue = normalise(dialogue_of(form), Ground(source, Recall()))
    return list(dialogue.messages), list(dialogue.tools) or None, dict(dialogue.extra)


def open(
    model: str | os.PathLike[str] = "demo", *, progress: Callable[[float], None] | None = None, **settings: Any
) -> Headstart:
    """Loads a model.

        with headstart.open("model.gguf", ctx=8192, reuse="exact") as hs:
            print(hs.chat("Hello").text)

    Args:
        model: path of a `.gguf`, or `demo` for the bundled one.
        progress: told the loaded share, from 0 to 1.
        settings: fields of `Settings`. The disk tier is on; `cache_dir=None` turns it off.

    Raises:
        ConfigError: a setting that does not exist or cannot work; the message names the mend.
        ModelError: the file is missing, broken or unsupported.
    """
    names = [field.name for field in dataclasses.fields(Settings) if field.name != "model"]
    if wrong := unknown("setting", settings, [*names, "progress"]):
        raise ConfigError(wrong)
    if not isinstance(model, str | os.PathLike):
        raise ConfigError(f"The model must be the path of a .gguf file, or 'demo', not {model!r:.100}.")
    settings.setdefault("cache_dir", default_cache_dir())
    return load(Settings(model=os.fspath(model), **settings), progress)


def load(settings: Settings, progress: Callable[[float], None] | None = None) -> Headstart:
    """`open` for settings that are complete. Raises what `open` raises."""
    from headstart.engines.llama import LlamaEngine  # loads the native library

    settings.template()  # what cannot be read is said before a model is loaded and proved
    engine = LlamaEngine.load(settings, progress=progress)
    try:
        return Headstart(Runtime(engine, settings))
    except BaseException:
        engine.close()
        raise
