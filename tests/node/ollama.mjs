// Ollama's own package: each method whose route is served, whole and streamed, and what is refused.

import { Ollama } from "ollama";

const [host, key, model] = process.argv.slice(2);
const client = new Ollama({ host, headers: { Authorization: `Bearer ${key}` } });
const asked = [{ role: "user", content: "Where does it rain? ".repeat(20) }];
const parameters = {
  type: "object",
  required: ["city"],
  properties: { city: { type: "string", description: "where" }, days: { type: "integer", description: "how many" } },
};
const tools = [{ type: "function", function: { name: "weather", description: "The weather.", parameters } }];

async function joined(stream) {
  const found = { content: "", thinking: "", calls: [], last: null, parts: 0 };
  for await (const part of stream) {
    found.parts += 1;
    const message = part.message ?? { content: part.response, thinking: part.thinking };
    found.content += message.content;
    found.thinking += message.thinking ?? "";
    found.calls.push(...(message.tool_calls ?? []));
    found.last = part;
  }
  return found;
}

async function refused(call) {
  try {
    await call();
  } catch (error) {
    return { name: error.name, status: error.status_code, message: error.message };
  }
}

const whole = await client.chat({ model, messages: asked, tools });
const streamed = await joined(await client.chat({ model, messages: asked, tools, stream: true }));
const results = whole.message.tool_calls.map((call) => ({ role: "tool", tool_name: call.function.name, content: "It rains." }));
const answered = await client.chat({ model, messages: [...asked, whole.message, ...results], tools });
const prompt = await client.generate({ model, prompt: "Name a river.", system: "Be brief." });
const parts = await joined(await client.generate({ model, prompt: "Name a river.", system: "Be brief.", stream: true }));

const left = await client.chat({ model, messages: asked, stream: true });
let seen;
for await (const part of left) {
  seen = part.message.content;
  left.abort();
  break;
}

const lists = { tags: await client.list(), ps: await client.ps(), show: await client.show({ model }), version: await client.version() };
const refusals = {
  embed: await refused(() => client.embed({ model, input: "hi" })),
  model: await refused(() => client.chat({ model: "llama3", messages: asked })),
  stream: await refused(() => client.chat({ model: "llama3", messages: asked, stream: true })),
  key: await refused(() => new Ollama({ host }).list()),
};
const load = await client.generate({ model, prompt: "", keep_alive: 0 });
const pulled = await client.pull({ model });
const fetched = [];
for await (const part of await client.pull({ model: "Own/Tiny-GGUF", stream: true })) {
  fetched.push(part);
}
const again = await client.pull({ model: "Own/Tiny-GGUF" });

process.stdout.write(JSON.stringify({ whole, streamed, answered, prompt, parts, seen, lists, refusals, load, pulled, fetched, again }));
