"""Chat templates of two common kinds, to put in tiny models: `tiny.write(path, architecture, chat_template=REASONING)`.

Both strip reasoning like templates of reasoning models. An assistant's message after the last user's message keeps its
reasoning, so that a tool loop can continue. An earlier message loses everything up to `</think>`. So a new user's message
changes the text from the first of those messages on. Reasoning is in `reasoning_content`, or in `content` before `</think>`.
"""

from __future__ import annotations

_LAST_USER = r"""
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
"""

_ASSISTANT = r"""
{%- set content = message.content or '' %}
{%- set reasoning = message.reasoning_content or '' %}
{%- if '</think>' in content %}
{%- set reasoning = reasoning or content.split('</think>')[0].split('<think>')[-1] %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<|im_start|>assistant\n' }}
{%- if reasoning and loop.index0 > ns.last %}{{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' }}{%- endif %}
{{- content }}
"""

REASONING = (
    _LAST_USER
    + r"""
{%- for message in messages %}
{%- if message.role == 'assistant' %}
"""
    + _ASSISTANT
    + r"""
{%- else %}
{{- '<|im_start|>' + message.role + '\n' + message.content }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}
"""
)
"""ChatML whose generation header opens the reasoning, so that a reply begins inside it. It has no tools."""

TOOLS = (
    _LAST_USER
    + r"""
{%- set first = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools %}
{{- '<|im_start|>system\n' + first }}
{%- if first %}{{- '\n\n' }}{%- endif %}
{{- 'Functions that you can call:\n<tools>' }}
{%- for tool in tools %}{{- '\n' + tool | tojson }}{%- endfor %}
{{- '\n</tools>\nTo call one, write its name and arguments as JSON between <tool_call> and </tool_call>.<|im_end|>\n' }}
{%- elif first %}
{{- '<|im_start|>system\n' + first + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
"""
    + _ASSISTANT
    + r"""
{%- for call in message.tool_calls or [] %}
{%- set arguments = call.function.arguments %}
{%- if content or not loop.first %}{{- '\n' }}{%- endif %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{%- if arguments is string %}{{- arguments }}{%- else %}{{- arguments | tojson }}{%- endif %}
{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- elif not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
)
"""ChatML with tools: the system block lists them, calls are JSON, and results are in a user's message."""

TOOLS_ALONE = TOOLS.replace(
    _ASSISTANT, "{%- set content = message.content or '' %}{{- '<|im_start|>assistant\\n' + content }}\n"
)
"""The same without reasoning, so that a reply that must be a call or JSON begins with it."""

_CALLS = "{%- for call in message.tool_calls or [] %}"
_RESULT = "{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"


def _with(*changes: tuple[str, str]) -> str:
    source = TOOLS
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    return source


def _refuses(when: str, what: str) -> str:
    return f"{{%- if {when} %}}{{{{ raise_exception('{what}') }}}}{{%- endif %}}"


NO_SYSTEM = _refuses("messages[0].role == 'system'", "System role not supported") + TOOLS
"""TOOLS, but it refuses system messages, as Gemma 2's does."""

ONE_CALL = _with((_CALLS, _CALLS + _refuses("loop.length > 1", "Only one call at once!")))
"""TOOLS, but a reply may have one call only, as with Llama 3."""

NINE = _with(
    (_CALLS, _CALLS + _refuses("call.id is not defined or call.id | length != 9", "Ids must have length 9!")),
    (_RESULT, _refuses("not message.tool_call_id or message.tool_call_id | length != 9", "Ids must have length 9!") + _RESULT),
)
"""TOOLS, but ids of calls must have nine characters, as with Mistral."""

NAMED_IDS = (
    "{{- tools | tojson if tools }}{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.role == 'tool' %}{{- 'of ' + message.tool_call_id + ': ' }}{%- endif %}{{- message.content or '' }}"
    "{%- for call in message.tool_calls or [] %}{{- '<|tool_calls_section_begin|>' if loop.first }}"
    "{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}{{- call.function.arguments | tojson }}"
    "{{- '<|tool_call_end|>' }}{{- '<|tool_calls_section_end|>' if loop.last }}{%- endfor %}{{- '<|im_end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""It writes the ids of calls and no names of functions, as Kimi's does."""

THINKING = _with(
    ("message.reasoning_content", "message.thinking"),
    (_CALLS, _refuses("message.content and message.thinking and message.tool_calls", "content and thinking") + _CALLS),
)
"""TOOLS, but reasoning is in `thinking`, and not beside content in a reply with calls, as with gpt-oss."""
