// One request as a program in three languages. The key is a variable, never the key itself.

const quoted = (text) => "'" + text.replaceAll("'", "'\\''") + "'";

export const LANGUAGES = {
  curl: (url, body) =>
    `curl ${quoted(url + "/v1/chat/completions")} \\\n  -H 'Content-Type: application/json' -H "Authorization: Bearer $API_KEY" \\\n  -d ${quoted(JSON.stringify(body, null, 2))}`,
  Python: (url, body) => {
    const known = new Set(["model", "messages", "stream", "stream_options", "temperature", "top_p", "max_tokens", "seed", "stop", "presence_penalty", "frequency_penalty", "logprobs", "top_logprobs", "tools", "tool_choice", "response_format", "n"]);
    const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !known.has(name)));
    const lines = Object.entries(body).filter(([name]) => known.has(name) && !name.startsWith("stream")).map(([name, value]) => `    ${name}=${python(value)},`);
    if (Object.keys(extra).length) lines.push(`    extra_body=${python(extra)},`);
    return `import os\nfrom openai import OpenAI\n\nclient = OpenAI(base_url=${python(url + "/v1")}, api_key=os.environ.get("API_KEY", "none"))\nstream = client.chat.completions.create(\n${lines.join("\n")}\n    stream=True,\n)\nfor chunk in stream:\n    if chunk.choices:\n        print(chunk.choices[0].delta.content or "", end="", flush=True)`;
  },
  JavaScript: (url, body) =>
    `const response = await fetch(${JSON.stringify(url + "/v1/chat/completions")}, {\n  method: "POST",\n  headers: { "Content-Type": "application/json", Authorization: \`Bearer \${process.env.API_KEY}\` },\n  body: JSON.stringify(${JSON.stringify({ ...body, stream: false, stream_options: undefined }, null, 2)}),\n});\nconst answer = await response.json();\nconsole.log(answer.choices[0].message.content);`,
};

// The request with the data of its pictures cut away, which nobody could read.
export function withoutData(body) {
  return JSON.parse(JSON.stringify(body, (name, value) => (name === "url" && typeof value === "string" ? value.replace(/^(data:[^,]*,).*/s, "$1...") : value)));
}

export function python(value) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([k, v]) => `${JSON.stringify(k)}: ${python(v)}`).join(", ")}}`;
  return JSON.stringify(value);
}
