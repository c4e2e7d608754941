// All three dialects once on a real model, whose replies nothing but a grammar bends.

import { standardResponseFormat, standardTextFormat } from "openai/helpers/standard-schema";
import { jsonSchemaOutputFormat } from "@anthropic-ai/sdk/helpers/json-schema";

import { RIVER, RIVER_STANDARD, RULES as FEW, WEATHER, anthropic, model, openai, report } from "./clients.mjs";

const RULES = FEW.repeat(3);
const temperature = 0;
const found = {};

async function conversed(ask, stream) {
  const first = await ask("Name a river in France.");
  const streamed = await stream("Name a river in France.");
  const second = await ask("And one in Spain?", first);
  return { first, streamed, second };
}

{
  const options = { model, temperature, max_tokens: 24 };
  const history = (text, before) => [
    { role: "system", content: RULES },
    ...(before ? [{ role: "user", content: "Name a river in France." }, before.choices[0].message] : []),
    { role: "user", content: text },
  ];
  const { completions } = openai.chat;
  found.chat = await conversed(
    (text, before) => completions.create({ ...options, messages: history(text, before) }),
    (text) => completions.stream({ ...options, messages: history(text) }).finalChatCompletion(),
  );
  const messages = [{ role: "user", content: "How will it be in Oslo?" }];
  const response_format = standardResponseFormat(RIVER_STANDARD, "river");
  found.chat.parsed = (await completions.parse({ ...options, messages, response_format, max_tokens: 60 })).choices[0].message.parsed;
  const tools = [{ type: "function", function: { name: "weather", parameters: WEATHER, strict: true } }];
  const calling = { ...options, messages, tools, tool_choice: "required", parallel_tool_calls: false, max_tokens: 300 };
  found.chat.call = (await completions.stream(calling).finalChatCompletion()).choices[0];
}

{
  const { responses } = openai;
  const options = { model, temperature, instructions: RULES, max_output_tokens: 24 };
  found.responses = await conversed(
    (input, before) => responses.create({ ...options, input, previous_response_id: before?.id ?? null }),
    (input) => responses.stream({ ...options, input }).finalResponse(),
  );
  const text = { format: standardTextFormat(RIVER_STANDARD, "river") };
  const input = "How will it be in Oslo?";
  found.responses.parsed = (await responses.parse({ ...options, input, text, max_output_tokens: 60 })).output_parsed;
  const tools = [{ type: "function", name: "weather", parameters: WEATHER, strict: true }];
  const calling = { model, temperature, input, tools, tool_choice: "required", parallel_tool_calls: false, max_output_tokens: 300 };
  found.responses.call = (await responses.stream(calling).finalResponse()).output;
}

{
  const options = { model, temperature, max_tokens: 24, system: [{ type: "text", text: RULES, cache_control: { type: "ephemeral" } }] };
  const history = (text, before) => [
    ...(before ? [{ role: "user", content: "Name a river in France." }, { role: "assistant", content: before.content }] : []),
    { role: "user", content: text },
  ];
  found.messages = await conversed(
    (text, before) => anthropic.messages.create({ ...options, messages: history(text, before) }),
    (text) => anthropic.messages.stream({ ...options, messages: history(text) }).finalMessage(),
  );
  const messages = history("How will it be in Oslo?");
  const output_config = { format: jsonSchemaOutputFormat(RIVER) };
  found.messages.parsed = (await anthropic.messages.parse({ ...options, messages, output_config, max_tokens: 60 })).parsed_output;
  const tools = [{ name: "weather", input_schema: WEATHER, strict: true }];
  const calling = { model, temperature, messages, tools, tool_choice: { type: "any", disable_parallel_tool_use: true }, max_tokens: 300 };
  found.messages.call = await anthropic.messages.stream(calling).finalMessage();
}

report(found);
