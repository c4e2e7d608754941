"""The bundled model behind Ollama's API: its own package, and LangChain's, which speaks only this API."""

from __future__ import annotations

import json

import pytest
from ollama import Client

from live import Server

pytestmark = pytest.mark.slow

SYSTEM = "You are a terse assistant. " * 30
RIVER = {
    "type": "object",
    "properties": {"river": {"enum": ["Ebro", "Tajo"]}, "long": {"type": "boolean"}},
    "required": ["river", "long"],
    "additionalProperties": False,
}


def weather(city: str) -> str:
    """Says what the weather is in a city."""
    return f"Rain in {city}."


def test_a_conversation_is_computed_once(real: Server) -> None:
    options = {"temperature": 0, "num_predict": 24}
    asked = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Name a river in Spain."}]
    with Client(real.url) as client:
        first = client.chat("demo", asked, options=options)
        *parts, last = client.chat("demo", asked, options=options, stream=True)
        assert "".join(part.message.content or "" for part in parts) == first.message.content
        assert (last.done_reason, last.prompt_eval_count) == (first.done_reason, first.prompt_eval_count)
        messages = [*asked, first.message.model_dump(exclude_none=True), {"role": "user", "content": "And one in Italy?"}]
        second = real.post("/api/chat", json={"messages": messages, "options": options, "stream": False}).json()
        assert second["prompt_eval_count"] > (first.prompt_eval_count or 0) > 100
        fresh = second["prompt_eval_count"] - (first.prompt_eval_count or 0) - (first.eval_count or 0)
        assert second["headstart"]["computed"] <= fresh + 8
        answer = json.loads(client.chat("demo", asked, format=RIVER, options={"temperature": 0}).message.content or "")
        assert set(answer) == {"river", "long"}
        (listed,) = client.list().models
        assert listed.details is not None
        assert (listed.details.family, listed.details.parameter_size) == ("llama", "134.5M")
        assert listed.details.quantization_level
        assert (listed.size or 0) > 50e6
        assert (client.show("demo").modelinfo or {})["llama.context_length"] > 1024


def test_langchain(real: Server) -> None:
    # Here, because importing it takes a second, also where slow tests are skipped.
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
    from langchain_ollama import ChatOllama, OllamaLLM

    chat = ChatOllama(model="demo", base_url=real.url, temperature=0, num_predict=16, validate_model_on_init=True)
    asked = [HumanMessage("Name a river in Spain.")]
    whole = chat.invoke(asked)
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] <= 16
    assert "".join(str(part.content) for part in chat.stream(asked)) == whole.content
    structured = chat.model_copy(update={"num_predict": 64}).with_structured_output(RIVER, method="json_schema")
    assert set(structured.invoke(asked)) == {"river", "long"}
    call = {"name": "weather", "args": {"city": "Oslo"}, "id": "call_1"}
    history = [*asked, AIMessage("", tool_calls=[call]), ToolMessage("Rain in Oslo.", tool_call_id="call_1")]
    assert chat.bind_tools([weather]).invoke(history).content is not None
    text = OllamaLLM(model="demo", base_url=real.url, temperature=0, num_predict=8)
    assert text.invoke("Hello") == "".join(text.stream("Hello"))
    for model in (chat, text):
        model._client.close()
