// Chat: a conversation with its settings, streamed, each token with its probability if that is asked for.

import { byId, element, events, model } from "./api.js";
import { Tree, standing } from "./branches.js";
import { LANGUAGES, withoutData } from "./code.js";
import { shade } from "./math.js";
import { allRead, areWaiting, beginPictures, contentOf, shown, takeWaiting } from "./pictures.js";
import { judge } from "./schema.js";

const OPTIONS = [
  ["temperature", 0, 2, 0.1, "0 takes the most likely token; higher is more varied."],
  ["top_p", 0, 1, 0.05, "Only the likeliest tokens that make up this share."],
  ["top_k", -1, 1000, 1, "Only so many of the likeliest tokens; -1 is all."],
  ["min_p", 0, 1, 0.01, "Only tokens at least so likely, against the likeliest."],
  ["max_tokens", 1, 1000000, 1, "Longest answer, in tokens."],
  ["seed", 0, 2147483647, 1, "The same seed gives the same answer."],
  ["presence_penalty", -2, 2, 0.1, "Above 0, tokens that occurred come less often."],
  ["frequency_penalty", -2, 2, 0.1, "The same, more for each time they occurred."],
  ["repetition_penalty", 0.1, 2, 0.05, "Above 1, tokens of prompt and answer come less often."],
  ["stop", null, null, null, "A text that ends the answer."],
];

let tree = new Tree();
let running = null;

export function beginPlay(address) {
  for (const [name, min, max, step, help] of OPTIONS) {
    const bounds = min === null ? {} : { type: "number", min, max, step };
    const field = element("input", { id: `option-${name}`, name, "aria-describedby": `help-${name}`, ...bounds });
    byId("sampling").append(element("div", {}, element("label", { for: field.id, text: name }), field, element("p", { class: "help", id: `help-${name}`, text: help })));
  }
  if (matchMedia("(max-width: 50rem)").matches) byId("settings").open = false;
  byId("say").addEventListener("submit", (event) => { event.preventDefault(); say(); });
  onEnter(byId("input"), say);
  byId("options").addEventListener("submit", (event) => event.preventDefault());
  byId("stop").addEventListener("click", () => running?.abort());
  byId("again").addEventListener("click", () => answer(tree.last.parent));
  byId("clear").addEventListener("click", () => { running?.abort(); tree = new Tree(); show(); byId("pace").textContent = ""; byId("input").focus(); });
  beginPictures(() => tree.path.flatMap(({ pictures }) => pictures));
  beginTips();
  beginCode(address);
}

function onEnter(field, act) {
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); act(); }
  });
}

function body() {
  const system = byId("system").value.trim();
  const sent = tree.path.map(({ role, content, pictures }) => ({ role, content: contentOf(content, pictures) }));
  const made = { model: model(), messages: system ? [{ role: "system", content: system }, ...sent] : sent };
  for (const [name, min] of OPTIONS) {
    const value = byId(`option-${name}`).value;
    if (value !== "") made[name] = min === null ? value : Number(value);
  }
  if (byId("colours").checked) Object.assign(made, { logprobs: true, top_logprobs: 5 });
  const schema = typedSchema(), more = byId("more").value.trim();
  if (schema !== null) made.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  return { ...made, ...(more ? JSON.parse(more) : {}), stream: true, stream_options: { include_usage: true } };
}

function typedSchema() {
  const text = byId("schema").value.trim();
  return text ? JSON.parse(text) : null;
}

// Whether the fields that hold JSON can be read; otherwise says what is wrong with them.
function readable() {
  try { body(); } catch (error) { byId("pace").textContent = `The schema or more fields are not JSON: ${error.message}`; return false; }
  return true;
}

async function say() {
  await allRead();
  const text = byId("input").value;
  if (!(text.trim() || areWaiting()) || running || !readable()) return;
  byId("input").value = "";
  answer(add(tree.last, "user", text, takeWaiting()));
}

function add(parent, role, content, pictures = []) {
  const made = Object.assign(tree.add(parent, role, content), { pictures });
  made.text = element("div", { class: "text", text: content });
  const user = role === "user", who = element("div", { class: "who" }, element("span", { text: user ? "You" : "Model" }));
  const steps = [[-1, "‹", "Earlier version"], [1, "›", "Later version"]].map(([step, text, label]) =>
    element("button", { type: "button", text, "aria-label": label, onclick: () => turn(made, step) }));
  made.steps = steps;
  made.place = element("span");
  made.versions = element("span", { class: "versions" }, steps[0], made.place, steps[1]);
  who.append(made.versions);
  if (user) who.append(made.edit = element("button", { type: "button", text: "Edit", "aria-label": "Edit this message as a new branch", onclick: () => edit(made) }));
  made.item = element("li", { class: role }, who, element("div", { class: "pictures" }, ...shown(pictures)), made.text);
  show();
  return made;
}

// Draws the branch that is shown. Messages that stay are not touched, so that nothing reads them out again.
function show() {
  const list = byId("messages"), path = tree.path;
  const same = path.findIndex((message, i) => list.children[i] !== message.item);
  const kept = same < 0 ? path.length : same;
  while (list.children.length > kept) list.lastElementChild.remove();
  list.append(...path.slice(kept).map((message) => message.item));
  for (const message of path) {
    const [at, count] = standing(message);
    message.versions.hidden = count < 2;
    message.place.textContent = `${at} of ${count}`;
    message.steps[0].disabled = Boolean(running) || at === 1;
    message.steps[1].disabled = Boolean(running) || at === count;
    if (message.edit) message.edit.disabled = Boolean(running);
  }
  byId("again").disabled = Boolean(running) || path.at(-1)?.role !== "assistant";
}

function turn(message, step) {
  const next = tree.turn(message, step);
  show();
  (next.steps.find((button, i) => !button.disabled && i === (step > 0 ? 1 : 0)) ?? next.steps.find((button) => !button.disabled))?.focus();
}

// Replaces a message by a field. What is sent from it becomes a branch beside the message.
function edit(message) {
  const field = element("textarea", { rows: "3", "aria-label": "Edited message" });
  field.value = message.content;
  const close = () => { form.replaceWith(message.text); message.edit.hidden = false; };
  const send = () => {
    if (!(field.value.trim() || message.pictures.length) || running || !readable()) return;
    close();
    answer(add(message.parent, "user", field.value, message.pictures));
    byId("input").focus();
  };
  const form = element("form", { class: "edit", onsubmit: (event) => { event.preventDefault(); send(); } }, field,
    element("div", { class: "row" }, element("button", { type: "submit", text: "Send" }), element("button", { type: "button", text: "Cancel", onclick: () => { close(); message.edit.focus(); } })));
  onEnter(field, send);
  field.addEventListener("keydown", (event) => { if (event.key === "Escape") { close(); message.edit.focus(); } });
  message.edit.hidden = true;
  message.text.replaceWith(form);
  field.focus();
}

// Has the model answer what stands behind `parent`, the last message to be sent, as a new branch.
async function answer(parent) {
  if (!readable()) return;
  parent.chosen = null;
  const asked = body(), schema = typedSchema();
  const message = add(parent, "assistant", ""), { item, text } = message;
  const started = performance.now();
  let first = 0, last = 0, count = 0;
  running = new AbortController();
  busy(true, text);
  try {
    for await (const chunk of events("v1/chat/completions", asked, running.signal)) {
      if (chunk.usage) count = chunk.usage.completion_tokens;
      const choice = chunk.choices[0];
      if (!choice) continue;
      last = performance.now();
      first ||= last;
      write(message, item, text, choice);
    }
    if (schema !== null && message.content) {
      const { fits, words } = judge(message.content, schema);
      item.append(element("p", { class: fits ? "help" : "error", role: "status", text: words }));
    }
  } catch (error) {
    if (error.name !== "AbortError") item.append(element("p", { class: "error", role: "alert", text: error.message }));
  } finally {
    running = null;
    busy(false, text);
  }
  const seconds = (last - first) / 1000;
  const rate = count > 1 && seconds > 0 ? `, ${((count - 1) / seconds).toFixed(1)} tokens/s` : "";
  byId("pace").textContent = first ? `${count || "Some"} ${count === 1 ? "token" : "tokens"}${rate}, the first after ${Math.round(first - started)} ms` : "";
}

function busy(is, text) {
  text.classList.toggle("busy", is);
  byId("send").disabled = is;
  byId("stop").disabled = !is;
  show();
}

function write(message, item, text, choice) {
  const { delta, logprobs } = choice;
  const thought = delta.reasoning ?? delta.reasoning_content;
  if (thought) folded(item, text, "reasoning", "Reasoning").append(thought);
  for (const call of delta.tool_calls ?? []) {
    const name = call.function?.name;
    const place = folded(item, text, `call-${call.index}`, name ? `Calls ${name}` : "Calls a tool");
    place.append(call.function?.arguments ?? "");
  }
  if (delta.content) text.append(...coloured(delta.content, logprobs?.content ?? []));
  message.content += delta.content ?? "";
}

// The text in its tokens, as far as they spell it: some are not shown, such as the one that ends an answer, and
// some are parts of a character.
function coloured(content, tokens) {
  const parts = [];
  for (const one of tokens) {
    if (!one.token || !content.startsWith(one.token)) continue;
    parts.push(token(one));
    content = content.slice(one.token.length);
  }
  return content ? [...parts, content] : parts;
}

function folded(item, text, kind, title) {
  let found = item.querySelector(`details[data-kind="${kind}"]`);
  if (!found) {
    found = element("details", { "data-kind": kind }, element("summary", { text: title }), element("div", { class: "text" }));
    item.insertBefore(found, kind === "reasoning" ? text : null);
  }
  return found.lastElementChild;
}

function token(one) {
  const alternatives = one.top_logprobs.map((each) => `${(100 * Math.exp(each.logprob)).toFixed(1).padStart(5)} %  ${JSON.stringify(each.token)}`);
  const first = !document.querySelector(".token[tabindex='0']");
  const said = `${JSON.stringify(one.token)}, ${(100 * Math.exp(one.logprob)).toFixed(0)} %`;
  return element("span", { class: `token p${shade(one.logprob)}`, role: "group", "aria-label": said, "aria-describedby": "tip", text: one.token, tabindex: first ? 0 : -1, "data-tip": alternatives.join("\n") });
}

function beginTips() {
  const tip = byId("tip"), list = byId("messages");
  const show = (event) => {
    const target = event.target.closest?.("[data-tip]");
    tip.hidden = !target;
    if (!target) return;
    const box = target.getBoundingClientRect();
    tip.textContent = target.dataset.tip;
    tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${box.bottom + tip.offsetHeight + 8 < innerHeight ? box.bottom + 4 : box.top - tip.offsetHeight - 4}px`;
  };
  for (const name of ["mouseover", "focusin"]) list.addEventListener(name, show);
  for (const name of ["mouseleave", "focusout"]) list.addEventListener(name, () => { tip.hidden = true; });
  list.addEventListener("keydown", (event) => {
    const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
    if (event.key === "Escape") tip.hidden = true;
    const next = step && event.target.classList.contains("token") && event.target[step];
    if (next) { event.preventDefault(); next.focus(); }
  });
}

function beginCode(address) {
  let language = "curl";
  const draw = () => {
    let text;
    try { text = LANGUAGES[language](address(), withoutData(body())); } catch (error) { text = `The schema or more fields are not JSON: ${error.message}`; }
    byId("code-text").textContent = text;
  };
  for (const name of Object.keys(LANGUAGES)) {
    byId("languages").append(element("button", { type: "button", text: name, onclick: () => { language = name; draw(); } }));
  }
  byId("show-code").addEventListener("click", () => { draw(); byId("code").showModal(); });
  byId("close-code").addEventListener("click", () => byId("code").close());
  byId("copy").addEventListener("click", () => {
    const range = document.createRange();
    range.selectNodeContents(byId("code-text"));
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    navigator.clipboard?.writeText(byId("code-text").textContent).catch(() => {});  // without TLS there is only the selection
  });
}
