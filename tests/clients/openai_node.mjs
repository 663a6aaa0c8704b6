// OpenAI's client for Node: chats whole and streamed, structured answers, responses, lists, errors.

import OpenAI from "openai";

const client = new OpenAI({
  baseURL: `${process.env.ASYNCLLM_TEST_URL}/v1`,
  apiKey: process.env.ASYNCLLM_TEST_KEY,
  maxRetries: 0,
});
const did = (what) => console.log(`did: ${what}`);
const check = (right, what) => {
  if (!right) throw new Error(what);
};
const asked = {
  model: "tiny-chat",
  messages: [{ role: "user", content: "What is 17 + 25?" }],
  temperature: 0,
  max_tokens: 32,
};

const whole = await client.chat.completions.create(asked);
const text = whole.choices[0].message.content;
check(text, "an empty answer");
did(`chat.completions.create: ${JSON.stringify(text)}`);

let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
check(streamed === text, "the stream says something else");
const runner = client.chat.completions.stream(asked);
check((await runner.finalContent()) === text, "the stream helper says something else");
did("chat.completions, streamed: the same");

const schema = {
  type: "object",
  properties: { colour: { enum: ["red", "blue"] } },
  required: ["colour"],
  additionalProperties: false,
};
const held = await client.chat.completions.parse({
  ...asked,
  response_format: { type: "json_schema", json_schema: { name: "colour", schema, strict: true } },
});
check(["red", "blue"].includes(JSON.parse(held.choices[0].message.content).colour), "another form");
did("chat.completions.parse: as the schema says");

const response = await client.responses.create({ model: "tiny-chat", input: "What is 17 + 25?", temperature: 0 });
let again = "";
for await (const event of await client.responses.create({
  model: "tiny-chat",
  input: "What is 17 + 25?",
  temperature: 0,
  stream: true,
})) {
  if (event.type === "response.output_text.delta") again += event.delta;
}
check(again === response.output_text, "the events say something else");
did("responses.create, whole and streamed");

const models = await client.models.list();
check(models.data[0].id === "tiny-chat", "another model");
try {
  await client.chat.completions.create({ ...asked, model: "other" });
  check(false, "an unknown model was taken");
} catch (error) {
  check(error instanceof OpenAI.NotFoundError, String(error));
}
did("models.list, and an error of its kind");
