"""The server's runtime in your own process.

    with headstart.open("model.gguf") as hs:
        chat = [{"role": "user", "content": "Name three rivers."}]
        first = hs.chat(chat)
        chat += [first.message, {"role": "user", "content": "Which is the longest?"}]
        for text in hs.chat(chat, stream=True):
            print(text, end="", flush=True)

The second call computes only the new question.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import queue
import threading
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict, Unpack, overload

from headstart.chat.chat_model import ChatModel
from headstart.chat.reply_builder import FinishReason, ReplyBuilder, ReplyReader
from headstart.config import Settings, default_cache_dir
from headstart.engines import registry
from headstart.engines.model_file import DEMO
from headstart.errors import Cancelled, ConfigError, InvalidRequest
from headstart.hub.progress import OnProgress
from headstart.hub.pull import ignore, resolve
from headstart.interfaces.conversation import Conversation, Message, ToolChoice
from headstart.interfaces.generation import GenerationParams
from headstart.interfaces.traits import EngineProof
from headstart.names import suggesting, unknown
from headstart.output.parser import ReplyDelta, TextDelta
from headstart.serving.listener import Listener
from headstart.serving.request import Delta, Event, Failed, Finished, Progress, Report, Request, Sink, Started
from headstart.serving.runtime import Runtime, check_shared

if TYPE_CHECKING:
    from pydantic import BaseModel


Messages = str | Sequence[Message]
"""A conversation; a bare text is one user message."""


class Options(TypedDict, total=False):
    """Options of `chat` and `complete`. `Sampling` explains the sampling options and has their defaults, except for those that
    `Settings` has.

    Attributes:
        max_tokens: most tokens of the reply; None for as many as the context holds; 0 only fills the cache.
        stop: texts that end the reply and are not part of it.
        salt: separates owners, such as the users of a program. KV that was computed for one salt is never used for another.
        reuse: False computes the whole prompt, without the cache. The result is stored as usual.
        json_schema: the format of the reply: a JSON schema, or a pydantic model whose `model_validate_json` can read the text.
        regex: the format as a regular expression (Rust's syntax) that matches the whole reply.
        grammar: the format as a grammar in llguidance's Lark. If `max_tokens` or `stop` ends a reply, it has only the beginning
            of what the format asks for.
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
    """Further options of `chat`.

    Attributes:
        tools: in OpenAI's format.
        tool_choice: `auto`, `none`, `required`, or the name of the tool to call.
        template: variables for the chat template, like `{"enable_thinking": False}`.
    """

    tools: Sequence[Mapping[str, Any]]
    tool_choice: str
    template: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """A complete reply, parsed as in the server.

    Attributes:
        text: the answer, without reasoning, tool calls, end token and stop text.
        reasoning: the model's reasoning; "" if there is none.
        tool_calls: in OpenAI's format: `{"id", "type": "function", "function": {"name", "arguments"}}`, arguments as JSON text.
        message: the reply as one message, ready to be appended to the conversation.
        finish_reason: `stop`, `length` or `tool_calls`.
        report: how many tokens were cached, restored and computed, and how long that took.
        tokens: the sampled tokens, including the end token.
    """

    text: str
    reasoning: str
    tool_calls: tuple[Mapping[str, Any], ...]
    message: Message
    finish_reason: FinishReason
    report: Report
    tokens: tuple[int, ...]

    @classmethod
    def built(cls, builder: ReplyBuilder, tokens: tuple[int, ...]) -> Reply:
        """The reply of a finished builder."""
        assert builder.report is not None
        message = builder.message
        calls = tuple(message.get("tool_calls") or ())
        return cls(builder.text, builder.reasoning, calls, message, builder.finish or "stop", builder.report, tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class _Prepared:
    """A request, how its reply is read (None: it is text), and the model that serves it."""

    request: Request
    model: ChatModel
    reader: ReplyReader | None = None


class _Call:
    """A submitted request, and the reply that is built from its events."""

    _over = True  # until there is a request to cancel

    def __init__(self, put: Sink, prepared: _Prepared) -> None:
        self._put = put
        self._builder = ReplyBuilder(0, reader=prepared.reader)
        self._model = prepared.model
        self._ready: deque[ReplyDelta] = deque()
        self._reply: Reply | None = None
        self._failure: Exception | None = None
        self._handle = prepared.model.runtime.submit(prepared.request, put)
        self._over = False

    @property
    def reply(self) -> Reply:
        """The complete reply. Raises RuntimeError if the stream was not read to its end."""
        if self._reply is None:
            raise RuntimeError("the stream was not read to its end")
        return self._reply

    def close(self) -> None:
        """Cancels an incomplete request at the next token or block boundary. Its finished blocks are kept.

        Thread-safe: a thread that waits for the next delta gets `Cancelled`.
        """
        if not self._over:
            self._over = True
            self._handle.cancel()
            self._put(Failed(Cancelled("the stream was closed")))

    def _take(self, event: Event) -> None:
        """Adds an event to the reply, and its deltas to `_ready`."""
        match event:
            case Started():
                self._builder.start(event)
            case Delta():
                self._ready.extend(self._builder.take(event))
            case Finished(tokens=tokens):
                self._over = True
                self._ready.extend(self._builder.end(event))
                self._reply = Reply.built(self._builder, tokens)
            case Failed(error=error):
                self._over, self._failure = True, error
                raise error

    def _pop(self, ended: bool) -> ReplyDelta | None:
        """The next delta; None after the end. `ended`: whether the reply had ended when its reader came, who then knows why."""
        if not self._ready and self._failure is not None and not ended:
            raise self._failure
        return self._ready.popleft() if self._ready else None

    def _remember(self) -> None:
        """Keeps what later requests want to know of the reply, before the caller can send it back. Takes milliseconds."""
        self._model.remember([self._builder])

    def __del__(self) -> None:
        self.close()


class Stream(_Call, Iterator[str]):
    """The text of a reply, while the model writes it. After the end, `reply` has the complete reply. `deltas` also yields
    reasoning and tool calls.

    The request is cancelled if you leave the loop early, call `close()`, leave a `with` block or drop the stream. If several
    threads read it, each delta goes to one of them.
    """

    def __init__(self, prepared: _Prepared) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._reading = threading.Lock()  # events are read in order, and their end ends all readers
        super().__init__(self._events.put, prepared)

    def __next__(self) -> str:
        while (delta := self._next()) is not None:
            if isinstance(delta, TextDelta):
                return delta.text
        raise StopIteration

    def __iter__(self) -> Iterator[str]:
        for delta in self.deltas():
            if isinstance(delta, TextDelta):
                yield delta.text

    def deltas(self) -> Iterator[ReplyDelta]:
        """What is new in the reply, in order: `TextDelta`, `ReasoningDelta`, `ToolCallStart`, `ToolCallDelta`."""
        try:
            while (delta := self._next()) is not None:
                yield delta
        finally:
            self.close()

    def _next(self) -> ReplyDelta | None:
        ended = self._over
        with self._reading:
            while not self._ready and not self._over:
                self._take(self._events.get())
                if self._reply is not None:
                    self._remember()
            return self._pop(ended)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncStream(_Call, AsyncIterator[str]):
    """`Stream` for `async for` and `async with`."""

    def __init__(self, prepared: _Prepared) -> None:
        events: asyncio.Queue[Event] = asyncio.Queue()
        self._events, self._reading = events, asyncio.Lock()
        loop = asyncio.get_running_loop()

        def put(event: Event) -> None:  # without the stream itself: the request holds it, and a dropped stream must go
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(events.put_nowait, event)

        super().__init__(put, prepared)

    async def __anext__(self) -> str:
        while (delta := await self._next()) is not None:
            if isinstance(delta, TextDelta):
                return delta.text
        raise StopAsyncIteration

    async def __aiter__(self) -> AsyncIterator[str]:  # a generator, because it notices when its loop is left
        async with contextlib.aclosing(self.deltas()) as deltas:
            async for delta in deltas:
                if isinstance(delta, TextDelta):
                    yield delta.text

    async def deltas(self) -> AsyncGenerator[ReplyDelta, None]:
        """What is new in the reply, in order: `TextDelta`, `ReasoningDelta`, `ToolCallStart`, `ToolCallDelta`."""
        try:
            while (delta := await self._next()) is not None:
                yield delta
        finally:
            self.close()

    async def _next(self) -> ReplyDelta | None:
        ended = self._over
        async with self._reading:
            while not self._ready and not self._over:
                self._take(await self._events.get())
                if self._reply is not None:
                    await asyncio.to_thread(self._remember)
            return self._pop(ended)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class Headstart:
    """A loaded model. Thread-safe. `close` it, or use it as a context manager.

    Args:
        runtime: `close` closes it too. For your own engine: `Headstart(Runtime(MyEngine))`. The engine's thread makes it.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._model = ChatModel(runtime)

    @overload
    def chat(self, messages: Messages, *, stream: Literal[False] = False, **options: Unpack[ChatOptions]) -> Reply: ...
    @overload
    def chat(self, messages: Messages, *, stream: Literal[True], **options: Unpack[ChatOptions]) -> Stream: ...
    def chat(self, messages: Messages, *, stream: bool = False, **options: Unpack[ChatOptions]) -> Reply | Stream:
        """The reply to a conversation; with `stream`, while the model writes it.

            reply = hs.chat([{"role": "user", "content": "Hello"}], max_tokens=50, temperature=0.0)
            print(reply.text, reply.report.cached, "of", reply.report.prompt, "tokens were cached")

            rivers = {"type": "array", "items": {"type": "string"}, "maxItems": 3}
            json.loads(hs.chat("Name three rivers.", json_schema=rivers).text)

        Raises:
            InvalidRequest: the chat template refuses the messages, an option is out of range, or a grammar cannot be used.
            ContextTooLong: the conversation exceeds the context.
            Overloaded: the queue is full.
            EngineError: the engine failed to compute.
            Unavailable: the runtime is closed, or this process was forked after it was made.
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
        """`complete` for asyncio. Cancelling the task cancels the request."""
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
        """Computes the common beginning of all conversations that continue `messages`, and stores it as usual.

            hs.warm([{"role": "system", "content": handbook}])

        Args:
            progress: called on the engine thread with the number of ready tokens and of all tokens. If it raises,
                the work ends.

        Raises what `chat` raises, and what `progress` raises.
        """
        conversation = self._model.canonical(_conversation(messages, tools, template, salt))
        request = Request(self.runtime.shared_prefix_prompt(conversation), GenerationParams(max_tokens=0))
        events: queue.SimpleQueue[Finished | Exception] = queue.SimpleQueue()

        def put(event: Event) -> None:
            if isinstance(event, Progress) and progress is not None:
                try:
                    progress(event.done, event.total)
                except Exception as error:
                    events.put(error)
                    raise
            elif isinstance(event, Failed):
                events.put(event.error)
            elif isinstance(event, Finished):
                events.put(event)

        handle = self.runtime.submit(request, put)
        try:
            end = events.get()
        except BaseException:  # an interrupt
            handle.cancel()
            raise
        if isinstance(end, Exception):
            raise end
        return end.report

    def close(self) -> None:
        """Fails running requests, and frees the model. Idempotent. In a forked process it does nothing."""
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

    def _chat(self, messages: Messages, options: dict[str, Any]) -> _Prepared:
        from headstart.library.options import CheckedOptions

        taken = {name: options.pop(name, None) for name in _BESIDE}
        checked = CheckedOptions.of(options, beside=("stream", *_BESIDE))
        conversation = _conversation(messages, taken["tools"], taken["template"], checked.salt, taken["tool_choice"])
        conversation = dataclasses.replace(conversation, format=checked.format())
        request, reader = self._model.request(conversation, checked.params(self.runtime.sampling), f"chat-{uuid.uuid4().hex}")
        return _Prepared(request, self._model, reader)

    def _complete(self, text: str, options: dict[str, Any]) -> _Prepared:
        from headstart.library.options import CheckedOptions

        if not isinstance(text, str):
            raise InvalidRequest(f"text must be a text, not {text!r:.100}.", param="text")
        checked = CheckedOptions.of(options)
        params = checked.params(self.runtime.sampling)
        prompt = self.runtime.text_prompt(text, salt=checked.salt, use_reply_tokens=params.reuse)
        grammar = self._model.plain_grammar(checked.format())
        request = Request(prompt, params, grammar=grammar)
        return _Prepared(request, self._model)

    def _serve(self, prepared: _Prepared, stream: bool) -> Reply | Stream:
        running = Stream(prepared)
        if stream:
            return running
        for _ in running:
            pass
        return running.reply

    async def _aserve(self, build: Callable[[], _Prepared], stream: bool) -> Reply | AsyncStream:
        prepared = await asyncio.to_thread(build)  # tokenising a long text takes a while
        running = AsyncStream(prepared)
        if stream:
            return running
        try:
            async for _ in running:
                pass
        finally:
            running.close()
        return running.reply


_BESIDE = ("tools", "tool_choice", "template")
"""The options of `chat` that are not in `Options`."""


def _conversation(messages: Messages, tools: Any, template: Any, salt: str, tool_choice: Any = None) -> Conversation:
    """The conversation in the caller's values, parsed as over HTTP. Raises InvalidRequest."""
    from pydantic import ValidationError

    from headstart.chat.messages import ChatBody, conversation_of
    from headstart.chat.validation import condense

    given: Any = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    if isinstance(given, Iterable):
        given = [dict(message) if isinstance(message, Mapping) else message for message in given]
    fields = {
        "messages": given,
        "tools": list(tools) if isinstance(tools, tuple) else tools,
        "chat_template_kwargs": dict(template) if isinstance(template, Mapping) else template,
    }
    try:
        body = ChatBody.model_validate(fields)
    except ValidationError as error:
        raise condense(error, fields, {"chat_template_kwargs": "template"}) from None
    return dataclasses.replace(conversation_of(body, salt), choice=_choice(tool_choice))


def _choice(given: object) -> ToolChoice:
    match given:
        case None | "auto":
            return ToolChoice()
        case "none":
            return ToolChoice("none")
        case "required":
            return ToolChoice("required")
        case str(name) if name:
            return ToolChoice("required", name)
    wanted = "'auto', 'none', 'required' or a tool's name"
    raise InvalidRequest(f"tool_choice must be {wanted}, not {given!r:.100}.", param="tool_choice")


def open(
    model: str | os.PathLike[str] = "demo",
    *,
    progress: Callable[[float], None] | None = None,
    on_pull: OnProgress | None = None,
    **settings: Any,
) -> Headstart:
    """Loads a model.

        with headstart.open("model.gguf", ctx=8192, reuse="exact") as hs:
            print(hs.chat("Hello").text)

    Args:
        model: path of a `.gguf` file, or of a folder with `config.json` and `*.safetensors` (for MLX);
            `OWNER/NAME[:QUANTISATION]` on a hub, fetched if it is not on this machine; another name that `headstart models`
            lists; or `demo` for the bundled model.
        progress: called with the loaded share, from 0 to 1.
        on_pull: called with a `PullProgress` while the model is fetched.
        settings: fields of `Settings`. The disk tier is on; `cache_dir=None` turns it off.

    Raises:
        ConfigError: a setting does not exist or cannot work; the message names the remedy.
        ModelError: the file is missing, broken or unsupported.
        HubError: the model cannot be fetched.
    """
    names = [field.name for field in dataclasses.fields(Settings) if field.name != "model"]
    if "no_disk" in settings:
        raise ConfigError("There is no setting no_disk: cache_dir=None stores nothing on disk.")
    if wrong := unknown("setting", settings, [*names, "progress", "on_pull"]):
        raise ConfigError(wrong)
    if not isinstance(model, str | os.PathLike):
        raise ConfigError(f"The model must be the path of a .gguf file or of a folder, a name, or 'demo', not {model!r:.100}.")
    settings.setdefault("cache_dir", default_cache_dir())
    chosen = Settings(model=os.fspath(model), **settings)
    if chosen.model != DEMO and not os.path.exists(os.path.expanduser(chosen.model)):
        chosen = dataclasses.replace(chosen, model=str(resolve(chosen.model, on_pull or ignore).path))
    return load(chosen, progress)


def load(
    settings: Settings,
    progress: Callable[[float], None] | None = None,
    *,
    listener: Listener | None = None,
    several: bool = False,
    together: Sequence[int] = (),
    proofs: Sequence[EngineProof] = (),
) -> Headstart:
    """`open` for complete settings. Raises what `open` raises.

    Args:
        listener: hears what the runtime holds and does.
        several: whether the settings were given for several models. Those of another engine are then left out, not refused.
        together, proofs: as in `EngineOptions`.
    """
    settings.template()  # raises before the model is loaded and proved
    check_shared(settings)
    given = dataclasses.replace(settings.engine_options(), together=tuple(together), proofs=tuple(proofs))
    options = registry.without_foreign(given) if several else given
    return Headstart(Runtime(lambda: registry.load(options, progress), settings, listener=listener))
