// The JavaScript package ollama against a running server: node ollama.mjs PACKAGE_FOLDER URL
// Prints nothing and ends with 0 if all is as it should be.
import assert from "node:assert/strict";
import { createRequire } from "node:module";

const [folder, host] = process.argv.slice(2);
const { Ollama } = createRequire(`${folder}/`)("ollama");
const client = new Ollama({ host });
const asked = {
  model: "demo",
  messages: [{ role: "user", content: "What is the capital of France?" }],
  options: { temperature: 0, num_predict: 24 },
};

const whole = await client.chat(asked);
assert.match(whole.message.content, /Paris/);

let streamed = "";
for await (const part of await client.chat({ ...asked, stream: true })) streamed += part.message.content;
assert.equal(streamed, whole.message.content);

const schema = { type: "object", properties: { city: { enum: ["Paris"] } }, required: ["city"] };
const formed = await client.chat({ ...asked, format: schema });
assert.deepEqual(JSON.parse(formed.message.content), { city: "Paris" });

assert.ok((await client.generate({ model: "demo", prompt: "Once", options: { num_predict: 4 } })).response);
assert.equal((await client.embed({ model: "demo", input: ["Hello", "Good day"] })).embeddings.length, 2);
assert.deepEqual((await client.list()).models.map(({ name }) => name), ["demo:latest"]);
assert.ok((await client.show({ model: "demo" })).capabilities.includes("completion"));
assert.equal((await client.ps()).models.length, 1);
await assert.rejects(client.pull({ model: "another" }), /\/api\/pull is not here/);
