// One answer: the request for it, and its stream, written into a message as it comes.

import { events } from "../api.js";
import { number } from "../dom.js";
import { contentOf } from "./attached.js";
import { repeats } from "./repetition.js";

/** The messages of a branch as /v1/chat/completions takes them. @param {import("./branches.js").Message[]} path */
export function sent(path, system) {
  const messages = path.map(({ role, content, pictures, texts, calls, tool }) => {
    if (role === "tool") return { role, tool_call_id: tool.id, content };
    if (!calls?.length) return { role, content: contentOf(content, pictures, texts) };
    return { role, content, tool_calls: calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } })) };
  });
  return system ? [{ role: "system", content: system }, ...messages] : messages;
}

const LOOK_EVERY = 200;

/**
 * Reads the stream of an answer into `message`, and calls `drawn` after each piece.
 * An error becomes a field of the message, except that somebody has stopped it; until its end it is unfinished.
 * One that repeats itself for long is stopped, unless somebody has asked for more of it.
 * @param {AbortSignal} signal
 */
export async function stream(message, asked, signal, drawn) {
  const started = performance.now();
  let first = 0, last = 0, count = 0, looked = 0;
  const pace = () => {
    const seconds = (last - first) / 1000;
    const rate = count > 1 && seconds > 0 ? ` · ${((count - 1) / seconds).toFixed(1)} tokens/s` : "";
    message.pace = first ? `${number(count)} ${count === 1 ? "token" : "tokens"}${rate} · first after ${Math.round(first - started)} ms` : "";
  };
  try {
    const body = { ...asked, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
    const hear = (words) => { message.pace = words; drawn(); };  // such as how far the model is loaded
    for await (const chunk of events("v1/chat/completions", body, signal, hear)) {
      if (chunk.usage) count = chunk.usage.completion_tokens;
      if (chunk.usage) message.used = chunk.usage.prompt_tokens + count;
      const choice = chunk.choices.find(({ index }) => index === 0);  // of several that the settings ask for the first is shown
      if (choice && count) {
        last = performance.now();
        first ||= last;
      }
      if (choice) write(message, choice);
      pace();
      drawn();
      const said = message.content || message.reasoning || "";
      if (said.length < looked + LOOK_EVERY || asked.continue_final_message) continue;
      looked = said.length;
      if ((message.repeats = repeats(said) || undefined)) return;
    }
    message.unfinished = undefined;
  } catch (error) {
    if (error.name !== "AbortError") message.error = error.message;
  }
}

function write(message, { delta, logprobs, finish_reason }) {
  const thought = delta.reasoning ?? delta.reasoning_content;
  if (thought) message.reasoning = (message.reasoning ?? "") + thought;
  for (const call of delta.tool_calls ?? []) {
    message.calls ??= [];
    const known = message.calls[call.index] ??= { id: call.id, name: "", arguments: "" };
    known.name ||= call.function?.name ?? "";
    known.arguments += call.function?.arguments ?? "";
  }
  if (delta.content) {
    const before = message.content ? [message.content] : [];
    message.content += delta.content;
    if (logprobs?.content) (message.tokens ??= before).push(...spelled(delta.content, logprobs.content));
    else message.tokens?.push(delta.content);
  }
  if (finish_reason === "length") message.cut = true;
}

/**
 * A piece of text in its tokens, as far as they spell it: some are not shown, such as the one that ends an answer, and some are
 * parts of a character. Each is a text, or a token with its logprob and its alternatives with theirs.
 * @returns {(string | [string, number, [string, number][]])[]}
 */
export function spelled(content, tokens) {
  const parts = [];
  for (const { token, logprob, top_logprobs } of tokens) {
    if (!token || !content.startsWith(token)) continue;
    parts.push([token, logprob, top_logprobs.map((one) => [one.token, one.logprob])]);
    content = content.slice(token.length);
  }
  return content ? [...parts, content] : parts;
}
