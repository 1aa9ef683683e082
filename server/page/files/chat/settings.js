// The drawer of settings: the system prompt and its presets, sampling, thinking, tools, the form of answers, what is shown.

import { get } from "../api.js";
import { byId, composes, element, iconButton, keep, kept, number } from "../dom.js";
import { chosen } from "../models.js";
import { dropAll, exportAll, importFile } from "./conversations.js";

/** Name, bounds and step of a number, where it stands, and what it does. A text has no bounds. */
const OPTIONS = [
  ["temperature", 0, 2, 0.1, "main", "0 takes the most likely token; higher is more varied."],
  ["max_tokens", 1, 1000000, 1, "main", "The most tokens of an answer."],
  ["seed", 0, 2147483647, 1, "main", "The same seed gives the same answer."],
  ["top_p", 0, 1, 0.05, "more", "Only the likeliest tokens that make up this share."],
  ["top_k", -1, 1000, 1, "more", "Only so many of the likeliest tokens; -1 is all."],
  ["min_p", 0, 1, 0.01, "more", "Only tokens at least so likely, against the likeliest."],
  ["presence_penalty", -2, 2, 0.1, "more", "Above 0, tokens that occurred come less often."],
  ["frequency_penalty", -2, 2, 0.1, "more", "The same, more for each time they occurred."],
  ["repetition_penalty", 0.1, 2, 0.05, "more", "Above 1, tokens of prompt and answer come less often."],
  ["stop", null, null, null, "more", "A text that ends the answer."],
];
/** What holds where neither the settings nor the model's generation defaults name a value. */
const NEUTRAL = { temperature: 1, seed: "random", top_p: 1, top_k: -1, min_p: 0, presence_penalty: 0, frequency_penalty: 0, repetition_penalty: 1, stop: "none" };
const EFFORTS = [["", "Automatic"], ["none", "None"], ["low", "Low"], ["medium", "Medium"], ["high", "High"]];
const PRESETS = {
  Brief: "Answer in as few words as possible, without an introduction.",
  Tutor: "You are a patient tutor. Do not give the solution at once: ask questions and give hints that lead to it.",
  Programmer: "You are an experienced programmer. Answer with code that works, then say in a few sentences why it is so.",
  Editor: "Improve the grammar, clarity and flow of the text that you are given. Answer with the better text alone.",
  Translator: "Translate the text that you are given into English, or into German if it is English. Answer with the translation alone.",
};
const OWN = "presets", SAVED = "options";
const TOOLS = '[{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]';

let onSystem = () => {};

/** @param {(system: string) => void} act  called when somebody has changed the system prompt */
export function beginSettings(act) {
  onSystem = act;
  byId("open-settings").addEventListener("click", () => openSettings(byId("settings").hidden));
  byId("close-settings").addEventListener("click", () => openSettings(false));
  byId("settings").addEventListener("keydown", (event) => { if (event.key === "Escape" && !composes(event)) { event.stopPropagation(); openSettings(false); } });
  byId("role").addEventListener("click", () => openSettings(true));
}

/** Fills the drawer. It is not done before the page can be used, which is sooner then. */
export function fillSettings() {
  byId("options").append(...systemPart(), ...samplingPart(), ...formPart(), ...shownPart(), ...keptPart());
  byId("options").addEventListener("submit", (event) => event.preventDefault());
  byId("options").addEventListener("input", remember);
  recall();
}

export function openSettings(is) {
  byId("settings").hidden = !is;
  byId("open-settings").setAttribute("aria-expanded", is);
  showDefaults();
  (is ? byId("preset") : byId("open-settings")).focus();
}

/** Shows, in the fields that are empty, the values that requests have then. Of a model that is not loaded they are not known. */
export async function showDefaults() {
  const card = chosen();
  if (byId("settings").hidden || !card) return;
  let own = null;
  if (!card.state || card.state === "loaded") try { own = (await get("props", { "X-Model": card.id })).default_generation_settings.params; } catch { /* the server refuses it */ }
  if (card !== chosen()) return;
  const inForce = own && { ...NEUTRAL, max_tokens: card.max_model_len && `up to ${number(card.max_model_len)}`, ...own };
  for (const [name] of OPTIONS) byId(`option-${name}`).placeholder = inForce?.[name] ?? "";
  byId("help-own").textContent = inForce ? `Grey values hold where you write no others: they are the defaults of ${card.id}.` : `The values that ${card.id} has of its own are shown once it is loaded.`;
}

const help = (id, text) => element("p", { class: "help", id, text });
const part = (title, ...children) => element("details", { class: "part" }, element("summary", { text: title }), ...children);

function area(id, label, words, placeholder, rows = 3) {
  return [element("label", { for: id, text: label }), element("textarea", { id, rows, spellcheck: "false", placeholder, "aria-describedby": `help-${id}` }), help(`help-${id}`, words)];
}

function systemPart() {
  const list = element("select", { id: "preset", onchange: (event) => setByHand(all()[event.target.value] ?? "") });
  const field = element("textarea", { id: "system", rows: 4, "aria-describedby": "help-system", placeholder: "None", oninput: () => setByHand(field.value) });
  const saveAs = element("input", { id: "preset-name", placeholder: "Name", maxlength: 40, "aria-label": "Name of the preset" });
  const add = () => {
    const name = saveAs.value.trim();
    if (!name || !field.value.trim()) return;
    keep(OWN, { ...kept(OWN, {}), [name]: field.value });
    saveAs.value = "";
    showSystem(field.value);
  };
  saveAs.addEventListener("keydown", (event) => { if (event.key === "Enter" && !composes(event)) { event.preventDefault(); add(); } });
  const drop = iconButton("close", "Delete this preset", () => {
    const { [list.value]: _, ...rest } = kept(OWN, {});
    keep(OWN, rest);
    showSystem(field.value);
  }, { id: "drop-preset" });
  return [
    element("label", { for: "preset", text: "System prompt" }), element("div", { class: "row" }, list, drop),
    element("label", { for: "system", class: "unseen", text: "Text of the system prompt" }), field,
    help("help-system", "How the model shall answer, for the whole conversation. New ones begin with the last that was chosen."),
    element("div", { class: "row", id: "save-preset" }, saveAs, element("button", { type: "button", text: "Keep as preset", onclick: add })),
  ];
}

const all = () => ({ ...PRESETS, ...kept(OWN, {}) });

function setByHand(text) {
  keep("system", text);
  showSystem(text);
  onSystem(text);
}

/** Shows the system prompt of a conversation, in the drawer and below the message. */
export function showSystem(text) {
  const own = kept(OWN, {}), presets = all(), name = Object.keys(presets).find((one) => presets[one] === text) ?? "";
  byId("role").hidden = !text.trim();
  byId("role").textContent = name || "System prompt";
  byId("role").title = text;
  if (!byId("preset")) return;  // it is not filled yet
  const first = name || !text ? "None" : "Own text";
  byId("preset").replaceChildren(...["", ...Object.keys(presets)].map((one) => element("option", { value: one, text: one || first })));
  byId("preset").value = name;
  if (byId("system").value !== text) byId("system").value = text;
  byId("drop-preset").hidden = !(name in own);
  byId("save-preset").hidden = Boolean(name || !text.trim());
}

export const lastSystem = () => kept("system", "");

function samplingPart() {
  const made = (place) => OPTIONS.filter((one) => one[4] === place).map(([name, min, max, step, , words]) => {
    const bounds = min === null ? {} : { type: "number", min, max, step, inputmode: "decimal" };
    return element("div", { class: "option" }, element("label", { for: `option-${name}`, text: name }),
      element("input", { id: `option-${name}`, name, "aria-describedby": `help-${name}`, ...bounds }), help(`help-${name}`, words));
  });
  const thinking = element("div", { class: "option" }, element("label", { for: "effort", class: "words", text: "Thinking" }),
    element("select", { id: "effort" }, ...EFFORTS.map(([value, text]) => element("option", { value, text }))), help("help-effort", "Reasoning effort, for models that reason."));
  return [element("h3", { text: "Answers" }), element("p", { class: "help", id: "help-own" }), ...made("main"), thinking, part("More sampling", ...made("more"))];
}

function formPart() {
  return [part("Tools, schema, other fields",
    ...area("tools", "Tools, as JSON", "What the model may call. The page asks you for what a tool returns.", TOOLS),
    ...area("schema", "Schema of the answer, as JSON", "Answers must match it.", '{"type": "object", "properties": {"city": {"type": "string"}}}'),
    ...area("more", "Other fields, as JSON", "Any other field of /v1/chat/completions.", '{"response_format": {"type": "json_object"}}'))];
}

function shownPart() {
  return [
    element("h3", { text: "Look closer" }),
    element("label", { class: "check" }, element("input", { type: "checkbox", id: "colours", "aria-describedby": "help-colours" }), " Colour tokens by probability"),
    help("help-colours", "Asks for five alternatives of each token; point at one, or move to it with the arrow keys."),
    element("div", { class: "row" }, element("button", { type: "button", id: "show-code", text: "The request as code" }),
      element("button", { type: "button", id: "reset", text: "Reset settings", onclick: reset })),
  ];
}

function keptPart() {
  const file = element("input", { type: "file", id: "import-file", accept: "application/json,.json", hidden: true, "aria-label": "File to import" });
  file.addEventListener("change", async () => { for (const one of file.files) await importFile(one); file.value = ""; });
  return [
    element("h3", { text: "Conversations" }),
    element("div", { class: "row" }, element("button", { type: "button", text: "Export all", onclick: exportAll }),
      element("button", { type: "button", text: "Import", onclick: () => file.click() }), file,
      element("button", { type: "button", text: "Delete all", onclick: dropAll })),
    help("help-kept", "They lie in this browser alone. The server keeps none of them."),
    element("h3", { text: "Keys" }),
    element("dl", { class: "keys" }, ...[["Ctrl Shift O", "new chat"], ["Ctrl K", "search conversations"], ["Esc", "stop the answer"], ["↑", "edit the last message, in an empty field"]]
      .map(([key, what]) => element("div", {}, element("dt", {}, element("kbd", { text: key })), element("dd", { text: what })))),
  ];
}

const fieldsKept = () => [...byId("options").querySelectorAll("input[id^=option-], #effort, #tools, #schema, #more, #colours")];

function remember() {
  keep(SAVED, Object.fromEntries(fieldsKept().map((field) => [field.id, field.type === "checkbox" ? field.checked : field.value])));
}

function recall() {
  const saved = kept(SAVED, {});
  for (const field of fieldsKept()) {
    if (field.type === "checkbox") field.checked = Boolean(saved[field.id]);
    else field.value = saved[field.id] ?? "";
  }
}

function reset() {
  keep(SAVED, {});
  recall();
}

function parsed(id, name) {
  const text = byId(id).value.trim();
  try { return text ? JSON.parse(text) : null; } catch (error) { throw new SyntaxError(`${name}: this is no JSON: ${error.message}`); }
}

/** The fields of a request that the settings ask for. Raises a SyntaxError that says which of them is no JSON. */
export function fields() {
  const made = {};
  for (const [name, min] of OPTIONS) {
    const { value } = byId(`option-${name}`);
    if (value !== "") made[name] = min === null ? value : Number(value);
  }
  if (byId("effort").value) made.reasoning_effort = byId("effort").value;
  if (byId("colours").checked) Object.assign(made, { logprobs: true, top_logprobs: 5 });
  const form = parsed("schema", "The schema"), tools = parsed("tools", "Tools"), more = parsed("more", "Other fields") ?? {};
  if (typeof more !== "object" || Array.isArray(more)) throw new SyntaxError('Other fields: this is no JSON object, such as {"top_k": 5}.');
  if (form !== null) made.response_format = { type: "json_schema", json_schema: { name: "answer", schema: form } };
  if (tools !== null) made.tools = tools;
  return { ...made, ...more };
}
