// The JavaScript package openai against a running server: node openai.mjs PACKAGE_FOLDER URL
// Prints nothing and ends with 0 if all is as it should be.
import assert from "node:assert/strict";
import { createRequire } from "node:module";

const [folder, url] = process.argv.slice(2);
const { OpenAI } = createRequire(`${folder}/`)("openai");
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "-", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France?" }];

const whole = await client.chat.completions.create({ model: "demo", messages, temperature: 0 });
assert.match(whole.choices[0].message.content, /Paris/);

let streamed = "";
const stream = await client.chat.completions.create({ model: "demo", messages, temperature: 0, stream: true });
for await (const chunk of stream) streamed += chunk.choices[0]?.delta?.content ?? "";
assert.equal(streamed, whole.choices[0].message.content);

const schema = {
  type: "object",
  properties: { city: { enum: ["Paris", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};
const formed = await client.chat.completions.create({
  model: "demo",
  messages,
  response_format: { type: "json_schema", json_schema: { name: "place", schema, strict: true } },
});
assert.ok(["Paris", "Rome"].includes(JSON.parse(formed.choices[0].message.content).city));

const responded = await client.responses.create({ model: "demo", input: messages[0].content, temperature: 0 });
assert.match(responded.output_text, /Paris/);

const vectors = await client.embeddings.create({ model: "demo", input: ["Hello", "Good day"] });
assert.equal(vectors.data.length, 2);
assert.equal(typeof vectors.data[0].embedding[0], "number");

await assert.rejects(client.chat.completions.create({ model: "another", messages }), OpenAI.NotFoundError);
