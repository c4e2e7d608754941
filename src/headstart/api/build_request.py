"""Compose: a dialogue → the request that goes to the engine, and how its replies are read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request as HttpRequest

from headstart.api.body import Body
from headstart.api.encoder import Teller
from headstart.api.service import Service
from headstart.chat import tenancy
from headstart.chat.conversation import Dialogue, Format, Tool
from headstart.chat.normalize import normalise, normalise_reply
from headstart.chat.reply_builder import Reading
from headstart.errors import ContextTooLong, InvalidRequest
from headstart.explain.explain import Explanation
from headstart.explain.record import Record
from headstart.interfaces.engine import Sampling
from headstart.output.grammar import Grammar, grammar_for
from headstart.prompt.builder import Prompt
from headstart.prompt.family_detection import Family
from headstart.serving.request import Request
from headstart.serving.runtime import Runtime

_PLAIN = Family("text")
_SCHEMA = "failed to compile JSON schema: "
"""llguidance's words in front of what is wrong with a schema."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a caller wants of a reply. `max_tokens`: None for as many as fit; `reuse`: whether cached rows may be used."""

    sampling: Sampling
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    choices: int = 1
    reuse: bool = True
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """A body, understood: one request for each prompt, and how to answer. `done`: called when all is well and complete."""

    form: Body
    requests: list[Request]
    teller: Teller
    stream: bool = False
    done: Callable[[], None] = lambda: None


def prompt_of(service: Service, runtime: Runtime, dialogue: Dialogue, *, spelled: bool = True) -> tuple[Dialogue, Prompt]:
    """A dialogue in its canonical form, and its prompt.

    Raises what `Runtime.chat_prompt` raises, and InvalidRequest if two tools have the same name.
    """
    names = Counter(tool["function"]["name"] for tool in dialogue.tools)
    if twice := next((name for name, times in names.items() if times > 1), None):
        raise InvalidRequest(f"Invalid 'tools': two have the name '{twice[:100]}'.", param="tools")
    dialogue, begun = _begun(normalise(dialogue, service.ground, service.keep_noise))
    prompt = runtime.chat_prompt(
        dialogue.messages,
        tools=dialogue.tools or None,
        salt=dialogue.salt,
        spelled=spelled,
        begun=begun,
        breakpoints=dialogue.breakpoints,
        **dialogue.extra,
    )
    return dialogue, prompt


def count(service: Service, runtime: Runtime, dialogue: Dialogue) -> int:
    """Tokens of a dialogue's prompt, also of one that is too long to be answered: clients count to know when to compact."""
    try:
        return len(prompt_of(service, runtime, dialogue)[1])
    except ContextTooLong as error:
        return error.prompt_tokens


def compose(service: Service, runtime: Runtime, dialogue: Dialogue, wishes: Wishes, seed: str) -> tuple[Request, Reading]:
    """The request of a dialogue. `seed`: of the ids of calls; the answer's own id.

    Raises:
        InvalidRequest: the template refuses the messages, a schema or grammar cannot be used, or a tool is not there.
        ContextTooLong: the conversation does not fit.
    """
    _check(dialogue)
    dialogue, prompt = prompt_of(service, runtime, dialogue, spelled=wishes.reuse)
    family = runtime.prompter.family
    thinking = family.opened(prompt.text)
    calls = bool(dialogue.tools) and dialogue.choice.mode != "none"
    begun = prompt.source.begun if prompt.source is not None else ""
    reading = Reading(dialogue, family, calls, thinking, begun, seed, service.moment())
    request = Request(
        prompt=prompt,
        sampling=wishes.sampling,
        max_tokens=wishes.max_tokens,
        stop=wishes.stop,
        choices=wishes.choices,
        reuse=wishes.reuse,
        ignore_eos=wishes.ignore_eos,
        grammar=_grammar(runtime, reading),
        visible=runtime.prompter.visible,
        alias=seed,
        returns=lambda text, cut: normalise_reply(
            reading.message(text, cut=cut), dialogue, service.ground, service.keep_noise
        ),
    )
    return request, reading


Told = Callable[[Explanation | None], Explanation | None]
"""What is to be told of a request, by why it computed what it computed."""


def compared(runtime: Runtime, request: HttpRequest, made: Request, named: str | None) -> Told:
    """How to explain a request whose caller wants it compared with the one whose answer it has `named`.

    Where both go on alike, only what was not kept is told; where that request is forgotten, what differs from the nearest.
    """
    tenant = tenancy.told(request.scope.get("tenant", tenancy.OPEN), made.prompt.salt)

    def seen(record: Record) -> bool:
        return (record.alias, record.salt, record.tenant) == (named, made.prompt.salt, tenant)

    record = runtime.scheduler.history.last(seen) if named else None
    if record is None:
        return lambda own: own
    found = runtime.compare(made.prompt, record)
    return lambda own: found or (own if own is not None and own.where is None else None)


def remember(service: Service, teller: Teller) -> None:
    """Keeps what the caller may not send back of a reply."""
    reading = teller.reading
    if reading is None or not reading.dialogue.messages or service.late(reading.dialogue.salt, reading.moment):
        return
    for draft in teller.drafts:
        service.recall.reply(reading.dialogue.salt, reading.dialogue.messages, draft.message)


def _grammar(runtime: Runtime, reading: Reading) -> Grammar | None:
    dialogue = reading.dialogue
    choice = dialogue.choice
    tools = callable_tools(dialogue) if reading.tools else ()
    named = {"type": "function", "function": {"name": choice.name}}
    controls = runtime.prompter.controls

    def made(tools: Sequence[Tool], choice: Any, parallel: bool, form: Format | None) -> Grammar | None:
        return grammar_for(reading.family, tools, choice, parallel, response_format(form), reading.thinking, controls)

    grammar = made(tools, choice.mode if choice.name is None else named, choice.parallel, dialogue.format)
    if grammar is None:
        return None
    param = "response_format" if dialogue.format is not None else "tools"
    try:
        return runtime.check_grammar(grammar, salt=dialogue.salt, param=param)
    except InvalidRequest as error:
        if _SCHEMA not in error.message:
            raise
        # A place in a grammar that nobody sees tells nothing: each schema alone tells which one it is.
        for tool in tools:
            what = f"Invalid 'tools': the schema of '{tool['function']['name'][:100]}'"
            _blame(runtime, made([tool], "required", False, None), what, "tools")
        _blame(runtime, made((), "none", False, dialogue.format), "Invalid 'response_format': its schema", "response_format")
        raise


def _blame(runtime: Runtime, grammar: Grammar | None, what: str, param: str) -> None:
    try:
        if grammar is not None:
            runtime.check_grammar(grammar)
    except InvalidRequest as error:
        said = error.message.partition(_SCHEMA)[2] or error.message
        raise InvalidRequest(f"{what} cannot be followed: {said}", param=param) from None


def plain_grammar(runtime: Runtime, wanted: Format | None) -> Grammar | None:
    """What a text must be that nobody parses. Raises InvalidRequest."""
    if wanted is None:
        return None
    return grammar_for(_PLAIN, response_format=response_format(wanted), controls=runtime.prompter.controls)


def response_format(wanted: Format | None) -> Mapping[str, Any] | None:
    """A format as OpenAI says it."""
    if wanted is None or wanted.kind == "json_object":
        return None if wanted is None else {"type": "json_object"}
    if wanted.kind == "json_schema":
        return {"type": "json_schema", "json_schema": {"schema": json.loads(wanted.text), "strict": wanted.strict}}
    return {"type": wanted.kind, wanted.kind: wanted.text}


def callable_tools(dialogue: Dialogue) -> tuple[Tool, ...]:
    """The tools that a reply may call."""
    allowed = dialogue.choice.allowed
    return tuple(tool for tool in dialogue.tools if allowed is None or tool["function"]["name"] in allowed)


def _begun(dialogue: Dialogue) -> tuple[Dialogue, str]:
    """The dialogue without the beginning of a reply that its caller gave, and that beginning."""
    if not dialogue.continues:
        return dialogue, ""
    *messages, last = dialogue.messages
    if last.get("tool_calls") or not isinstance(last["content"], str):
        raise InvalidRequest("A reply that is begun can only have text in it.", param="messages")
    return replace(dialogue, messages=tuple(messages)), last["content"]


def _check(dialogue: Dialogue) -> None:
    names = [tool["function"].get("name") for tool in dialogue.tools]
    choice = dialogue.choice
    for name in (choice.name, *(choice.allowed or ())):
        if name is not None and name not in names:
            raise InvalidRequest(f"Invalid 'tool_choice': there is no tool '{name[:100]}'.", param="tool_choice")
    if choice.mode == "required" and not names:
        raise InvalidRequest("Invalid 'tool_choice': a call is required, but there are no 'tools'.", param="tool_choice")
