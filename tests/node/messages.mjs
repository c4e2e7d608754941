import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";
import { jsonSchemaOutputFormat } from "@anthropic-ai/sdk/helpers/json-schema";

import { RIVER, RULES, WEATHER, anthropic, forecast, model, report } from "./clients.mjs";

const tools = [{ name: "weather", description: "The weather of a city.", input_schema: WEATHER }];
const cache_control = { type: "ephemeral" };
const found = { turns: [], counted: [], events: [], thoughts: [], fragments: [] };

const system = [{ type: "text", text: RULES, cache_control }];
const messages = [];
for (const text of ["Name a river.", "Another.", "A last one."]) {
  messages.push({ role: "user", content: [{ type: "text", text, cache_control }] });
  found.counted.push((await anthropic.messages.countTokens({ model, system, messages })).input_tokens);
  const answer = await anthropic.messages.create({ model, system, messages, max_tokens: 100 });
  messages.push({ role: "assistant", content: answer.content });
  delete messages.at(-2).content[0].cache_control;
  found.turns.push(answer);
}

const asked = { role: "user", content: "How will it be in Oslo and in Rome?" };
const options = { model, tools, max_tokens: 2000, thinking: { type: "enabled", budget_tokens: 1024 } };
const stream = anthropic.messages.stream({ ...options, messages: [asked] });
stream.on("streamEvent", ({ type }) => found.events.push(type));
stream.on("thinking", (delta) => found.thoughts.push(delta));
stream.on("text", (_, snapshot) => (found.text = snapshot));
stream.on("inputJson", (delta) => found.fragments.push(delta));
const calling = await stream.finalMessage();
found.streamed = calling;

const results = calling.content
  .filter((block) => block.type === "tool_use")
  .map((block) => ({ type: "tool_result", tool_use_id: block.id, content: forecast(block.input) }));
found.answered = await anthropic.messages.create({
  ...options,
  messages: [asked, { role: "assistant", content: calling.content }, { role: "user", content: results }],
});

// The SDK's own loop.
const ran = [];
const weather = betaTool({
  name: "weather",
  description: "The weather of a city.",
  inputSchema: WEATHER,
  run: (given) => (ran.push(given), forecast(given)),
});
const content = "And tomorrow in Rome?";
const loop = { model, max_tokens: 200, messages: [{ role: "user", content }], tools: [weather], stream: true };
found.loop = { ran, final: await anthropic.beta.messages.toolRunner(loop) };

const format = jsonSchemaOutputFormat(RIVER);
const given = { model, max_tokens: 100, messages: [{ role: "user", content: "Which river?" }], output_config: { format } };
found.parsed = (await anthropic.messages.parse(given)).parsed_output;
found.parsed_stream = (await anthropic.messages.stream(given).finalMessage()).parsed_output;

const warming = { model, system, messages: [asked] };
found.warmed = await anthropic.messages.create({ ...warming, max_tokens: 0 });
found.after_warming = await anthropic.messages.create({ ...warming, max_tokens: 50 });

report(found);
