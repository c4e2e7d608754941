import { standardTextFormat } from "openai/helpers/standard-schema";

import { RIVER_STANDARD, RULES, WEATHER, forecast, model, openai, report } from "./clients.mjs";

const { responses } = openai;
const tools = [{ type: "function", name: "weather", description: "The weather of a city.", parameters: WEATHER, strict: true }];
const found = { turns: [], events: [], snapshots: {} };

let last;
for (const input of ["Name a river.", "Another.", "A last one."]) {
  const options = { model, instructions: RULES, input, max_output_tokens: 100 };
  last = await responses.create({ ...options, previous_response_id: last?.id ?? null });
  found.turns.push(last);
}
found.retrieved = await responses.retrieve(last.id);
found.items = [];
for await (const item of responses.inputItems.list(last.id)) found.items.push(item);

const asked = { role: "user", content: "How will it be in Oslo and in Rome?" };
const options = { model, tools, max_output_tokens: 400 };
found.counted = await responses.inputTokens.count({ model, tools, input: [asked] });
const stream = responses.stream({ ...options, input: [asked], include: ["reasoning.encrypted_content"] });
stream.on("event", ({ type, sequence_number }) => found.events.push([type, sequence_number]));
stream.on("response.output_text.delta", ({ snapshot }) => (found.snapshots.text = snapshot));
stream.on("response.function_call_arguments.delta", ({ snapshot }) => (found.snapshots.arguments = snapshot));
const calling = await stream.finalResponse();
found.streamed = calling;

// Once with all that was said, once by its name.
const results = calling.output
  .filter((item) => item.type === "function_call")
  .map((item) => ({
    type: "function_call_output",
    call_id: item.call_id,
    output: forecast(JSON.parse(item.arguments)),
  }));
found.stateless = await responses.create({ ...options, store: false, input: [asked, ...calling.output, ...results] });
found.stored = await responses.create({ ...options, input: results, previous_response_id: calling.id });

const text = { format: standardTextFormat(RIVER_STANDARD, "river") };
const given = { model, input: "Which river?", max_output_tokens: 100, text };
found.parsed = (await responses.parse(given)).output_parsed;
found.parsed_stream = (await responses.stream(given).finalResponse()).output_parsed;

await responses.delete(last.id);
found.gone = await responses.retrieve(last.id).catch((error) => error.constructor.name);

report(found);
