// Two streams for two slots, then a third: each is left in the middle, and then somebody else is answered.

import { anthropic, model, openai, report } from "./clients.mjs";

const messages = [{ role: "user", content: "Tell me everything." }];
const max_tokens = 3500;

async function aborted(stream, kind) {
  let seen;
  await new Promise((go) => stream.once(kind, (delta) => go((seen = delta))));
  stream.abort();
  const error = await stream.done().then(
    () => null,
    (thrown) => thrown,
  );
  return { seen: typeof seen === "string" ? seen : seen.delta, error: error?.constructor.name, aborted: stream.aborted };
}

async function left(stream) {
  for await (const event of stream) if (event.type === "response.output_text.delta") return { seen: event.delta };
}

const [chat, responses] = await Promise.all([
  aborted(openai.chat.completions.stream({ model, messages, max_tokens }), "content"),
  openai.responses.create({ model, input: messages, max_output_tokens: max_tokens, stream: true }).then(left),
]);
const claude = await aborted(anthropic.messages.stream({ model, messages, max_tokens }), "text");
const answer = await openai.chat.completions.create({ model, messages: [{ role: "user", content: "Free?" }], max_tokens: 20 });

report({ chat, responses, claude, after: answer.choices[0].message.content });
