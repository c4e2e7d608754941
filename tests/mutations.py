"""Changes that clients make to a conversation, each with the cause and the place that the server must report."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from headstart.explain.causes import Cause, Where

Body = dict[str, Any]
Change = Callable[[Body], None]


def tool(name: str, description: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def conversation(number: int) -> Body:
    """A conversation that waits for a reply. Conversations with different numbers share no text."""
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    return {
        "tools": [tool("weather", f"Weather of a city, number {number}."), tool("clock", f"The time {number} in a city.")],
        "messages": [
            {"role": "system", "content": f"You are assistant {number}. Today is Monday, 3 March. Answer in short sentences."},
            {"role": "user", "content": f"Traveller {number} here: what is the weather in Paris, and what should I pack?"},
            {"role": "assistant", "content": f"Let me look, traveller {number}.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": f"{number}: rain, 9 degrees, wind from the west. " * 4},
            {"role": "assistant", "content": f"It rains, traveller {number}: take boots and an umbrella with you."},
            {"role": "user", "content": f"Thank you from {number}. What about Rome, and the road there?"},
        ],
        "max_tokens": 12,
        "ignore_eos": True,
    }


def following(body: Body, reply: str, number: int) -> Body:
    """The next turn."""
    more = copy.deepcopy(body)
    more["messages"] += [
        {"role": "assistant", "content": reply},
        {"role": "user", "content": f"One more thing for {number}: which of the two is cheaper at this time of the year?"},
    ]
    return more


@dataclass(frozen=True)
class Mutation:
    """A change of the next turn. `place`: character of the difference, if it is known beforehand.

    `again`: whether most of what follows could have been reused.
    """

    name: str
    change: Change
    cause: Cause | None
    where: Where | None = None
    message: int | None = None
    place: int | None = None
    again: bool = True
    turn: Literal["next", "same"] = "next"


def say(number: int, old: str, new: str) -> Change:
    """Replaces words in a message."""

    def change(body: Body) -> None:
        message = body["messages"][number]
        assert old in message["content"], message
        message["content"] = message["content"].replace(old, new, 1)

    return change


def put(**fields: Any) -> Change:
    return lambda body: body.update(fields)


def tools(change: Callable[[list[Any]], Any]) -> Change:
    def apply(body: Body) -> None:
        changed = change(body["tools"])
        if changed is not None:
            body["tools"] = changed

    return apply


def messages(change: Callable[[list[Any]], Any]) -> Change:
    def apply(body: Body) -> None:
        changed = change(body["messages"])
        if changed is not None:
            body["messages"] = changed

    return apply


def describe(body: Body) -> None:
    body["tools"][0]["function"]["description"] = "Something else."


def schema(body: Body) -> None:
    body["tools"][1]["function"]["parameters"]["properties"]["zone"] = {"type": "string"}


def arguments(body: Body) -> None:
    body["messages"][2]["tool_calls"][0]["function"]["arguments"] = '{"city": "Lyon"}'


def summary(chat: list[Any]) -> list[Any]:
    told = "This is a summary of the conversation so far: the traveller wants to go to Paris or Rome and to pack well."
    return [chat[0], {"role": "user", "content": told}, chat[-1]]


def handed_over(chat: list[Any]) -> list[Any]:
    return [chat[0], {"role": "user", "content": "Here is a summary of what was said. Go on from there, please."}]


CLEARED = "[Old tool result content cleared]"

MUTATIONS: tuple[Mutation, ...] = (
    Mutation("nothing", lambda body: None, None),
    Mutation("asked again", lambda body: None, None, turn="same"),
    Mutation("tool added", tools(lambda found: [*found, tool("maps", "A map.")]), Cause.TOOLS, "tools"),
    Mutation("tool put first", tools(lambda found: [tool("maps", "A map."), *found]), Cause.TOOLS, "tools"),
    Mutation("tool removed", tools(lambda found: found[:1]), Cause.TOOLS, "tools"),
    Mutation("all tools removed", lambda body: body.pop("tools"), Cause.TOOLS, "tools"),
    Mutation("tools in another order", tools(lambda found: found[::-1]), Cause.TOOLS, "tools"),
    Mutation("tool described otherwise", describe, Cause.TOOLS, "tools"),
    Mutation("tool with another schema", schema, Cause.TOOLS, "tools"),
    Mutation("date in the system prompt", say(0, "Monday, 3 March", "Tuesday, 4 March"), Cause.SYSTEM, "system", 0, 32),
    Mutation("system prompt extended", say(0, "short sentences.", "short sentences. Be kind."), Cause.SYSTEM, "system", 0),
    Mutation("system prompt removed", messages(lambda chat: chat[1:]), Cause.SYSTEM, "system", 0, 0),
    Mutation(
        "second system prompt",
        messages(lambda chat: [chat[0], {"role": "system", "content": "Be kind."}, *chat[1:]]),
        Cause.SYSTEM,
        "system",
        1,
    ),
    Mutation("template options", put(chat_template_kwargs={"style": "terse"}), Cause.TEMPLATE, "template"),
    Mutation("first user message edited", say(1, "weather in Paris", "weather in Nice"), Cause.MESSAGE, "messages", 1),
    Mutation("blank in a user message", say(1, "here: what", "here:  what"), Cause.MESSAGE, "messages", 1),
    Mutation("call with another argument", arguments, Cause.MESSAGE, "messages", 2),
    Mutation("reply in the middle edited", say(4, "boots", "shoes"), Cause.MESSAGE, "messages", 4),
    Mutation("second user message edited", say(5, "Rome", "Oslo"), Cause.MESSAGE, "messages", 5),
    Mutation(
        "last reply edited",
        messages(lambda chat: [*chat[:6], {**chat[6], "content": "¡" + chat[6]["content"]}, chat[7]]),
        Cause.MESSAGE,
        "messages",
        6,
        0,
        again=False,
    ),
    Mutation(
        "question asked otherwise",
        say(5, "Rome, and the road", "Rome or the road"),
        Cause.MESSAGE,
        "messages",
        5,
        again=False,
        turn="same",
    ),
    Mutation("role of a message", lambda body: body["messages"][4].update(role="user"), Cause.MESSAGE, "messages", 4),
    Mutation(
        "message inserted",
        messages(lambda chat: [*chat[:4], {"role": "user", "content": "By the way: it is spring."}, *chat[4:]]),
        Cause.MESSAGE,
        "messages",
        4,
    ),
    Mutation("tool result edited", say(3, "9 degrees", "7 degrees"), Cause.MESSAGE, "messages", 3),
    Mutation(
        "tool result cleared", lambda body: body["messages"][3].update(content=CLEARED), Cause.COMPACTED, "messages", 3, 0
    ),
    Mutation("oldest exchange dropped", messages(lambda chat: [chat[0], *chat[5:]]), Cause.COMPACTED, "messages", 1),
    Mutation("message in the middle dropped", messages(lambda chat: [*chat[:3], *chat[4:]]), Cause.COMPACTED, "messages", 3),
    Mutation("summary, question kept", messages(lambda chat: summary(chat[:6])), Cause.COMPACTED, "messages", 1),
    Mutation("summary alone", messages(handed_over), Cause.COMPACTED, "messages", 1, again=False),
    Mutation("last message removed", messages(lambda chat: chat[:-1]), None, turn="same"),
    Mutation("last exchange removed", messages(lambda chat: chat[:-4]), None, turn="same"),
    Mutation("computed anew", put(cache_prompt=False), Cause.DISABLED),
)
