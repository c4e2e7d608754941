import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

import { anthropic, model, openai, report } from "./clients.mjs";

const asked = [{ role: "user", content: "hi" }];
const long = [{ role: "user", content: "on and on ".repeat(2000) }];
const found = {};

async function refused(name, vendor, call) {
  const error = await call().then(
    () => new Error("it was not refused"),
    (thrown) => thrown,
  );
  const { status, code, param, type, message, requestID } = error;
  found[name] = { class: error.constructor.name, known: error instanceof vendor.APIError, status, code, param, type, message };
  found[name].request = requestID ?? null;
}

const chat = (client, more) => client.chat.completions.create({ model, messages: asked, max_tokens: 5, ...more });
const message = (client, more) => client.messages.create({ model, messages: asked, max_tokens: 5, ...more });
const responses = (more) => openai.responses.create({ model, input: "hi", max_output_tokens: 16, ...more });

const apiKey = "sk-wrong";
await refused("chat 401", OpenAI, () => chat(openai.withOptions({ apiKey })));
await refused("chat 404", OpenAI, () => openai.models.retrieve("none"));
await refused("chat 400", OpenAI, () => chat(openai, { temperature: 9 }));
await refused("chat long", OpenAI, () => chat(openai, { messages: long }));
await refused("chat long stream", OpenAI, () => openai.chat.completions.stream({ model, messages: long }).done());
await refused("responses 404", OpenAI, () => responses({ previous_response_id: "resp_none" }));
await refused("responses 400", OpenAI, () => responses({ input: [{ type: "function_call_output", output: "x" }] }));
await refused("responses stream", OpenAI, () => openai.responses.stream({ model, input: long }).done());
await refused("messages 401", Anthropic, () => message(anthropic.withOptions({ apiKey })));
await refused("messages 404", Anthropic, () => anthropic.models.retrieve("none"));
await refused("messages 400", Anthropic, () => message(anthropic, { messages: [{ role: "user", content: [{ type: "text" }] }] }));
await refused("messages long", Anthropic, () => message(anthropic, { messages: long }));
await refused("messages stream", Anthropic, () => anthropic.messages.stream({ model, messages: long, max_tokens: 5 }).done());

report(found);
