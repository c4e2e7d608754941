import { standardResponseFormat } from "openai/helpers/standard-schema";

import { RIVER_STANDARD, RULES, WEATHER, forecast, model, openai, report } from "./clients.mjs";

const { completions } = openai.chat;
const weather = { name: "weather", description: "The weather of a city.", parameters: WEATHER };
const tools = [{ type: "function", function: { ...weather, strict: true } }];
const found = { turns: [], streamed: { kinds: {}, fragments: [], done: [] } };

const messages = [{ role: "system", content: RULES }];
for (const content of ["Name a river.", "Another.", "A last one."]) {
  messages.push({ role: "user", content });
  const answer = await completions.create({ model, messages, max_tokens: 100 });
  messages.push(answer.choices[0].message);
  found.turns.push(answer);
}

const asked = [{ role: "user", content: "How will it be in Oslo and in Rome?" }];
const stream = completions.stream({ model, messages: asked, tools, max_tokens: 400, stream_options: { include_usage: true } });
let reasoning = "";
stream.on("chunk", (chunk) => (reasoning += chunk.choices[0]?.delta?.reasoning_content ?? ""));
stream.on("content.delta", ({ snapshot }) => (found.streamed.snapshot = snapshot));
stream.on("tool_calls.function.arguments.delta", ({ index, arguments_delta }) =>
  found.streamed.fragments.push([index, arguments_delta]),
);
stream.on("tool_calls.function.arguments.done", ({ index, name, parsed_arguments }) =>
  found.streamed.done.push({ index, name, parsed_arguments }),
);
const calling = await stream.finalChatCompletion();
found.streamed = { ...found.streamed, reasoning, final: calling, usage: await stream.totalUsage() };

// What the stream put together goes back, and the results with it.
const said = calling.choices[0].message;
const results = said.tool_calls.map((call) => ({
  role: "tool",
  tool_call_id: call.id,
  content: forecast(JSON.parse(call.function.arguments)),
}));
found.answered = await completions.create({ model, messages: [...asked, said, ...results], tools, max_tokens: 100 });

// The SDK's own loop.
const ran = [];
const runner = completions.runTools({
  model,
  messages: [{ role: "user", content: "And tomorrow in Rome?" }],
  max_tokens: 200,
  stream: true,
  tools: [
    {
      type: "function",
      function: { ...weather, parse: JSON.parse, function: (given) => (ran.push(given), forecast(given)) },
    },
  ],
});
found.loop = { content: await runner.finalContent(), ran, messages: runner.messages, usage: await runner.totalUsage() };

const format = standardResponseFormat(RIVER_STANDARD, "river");
const given = { model, messages: [{ role: "user", content: "Which river?" }], max_tokens: 100, response_format: format };
found.parsed = (await completions.parse(given)).choices[0].message.parsed;
found.parsed_stream = (await completions.stream(given).finalChatCompletion()).choices[0].message.parsed;

report(found);
