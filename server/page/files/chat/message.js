// How a message looks: its text, pictures, reasoning, calls of tools, and what can be done with it.

import { composes, copy, element, iconButton } from "../dom.js";
import { shown, shownTexts } from "./attached.js";
import { standing } from "./branches.js";
import { drawTokens } from "./tokens.js";

/**
 * @typedef {object} Acts  What the chat does when somebody asks a message for it
 * @property {(message: any) => void} again
 * @property {(message: any) => void} goOn
 * @property {(message: any, text: string) => boolean} resend  Whether the edited message was sent
 * @property {(message: any, text: string) => boolean} rewrite  Whether the edited answer was taken
 * @property {(message: any) => void} remove
 * @property {(message: any, step: number) => void} turn
 * @property {(message: any, results: string[]) => void} returnResults
 */

/** Why an answer is not what the model would have said to its end. */
const WORDS = {
  repeats: "The answer repeated itself and was stopped. A higher temperature or repetition_penalty may help.",
  cut: "The answer ended at its limit: max_tokens of the settings, or the context length.",
  edited: "You have edited this answer.",
  unfinished: "The answer was stopped before its end.",
};

/** Shows a text as it is, until the code that draws Markdown is there: the first screen does without it. */
let render = (place, source) => { place.textContent = source; };

export async function loadMarkdown() {
  ({ render } = await import("../text/markdown.js"));
}

/** @type {WeakMap<object, View>} */
const views = new WeakMap();

/** @param {Acts} acts */
export function viewOf(message, acts) {
  if (!views.has(message)) views.set(message, new View(message, acts));
  return views.get(message);
}

class View {
  constructor(message, acts) {
    this.message = message;
    this.acts = acts;
    this.text = element("div", { class: "text" });
    this.item = element("li", { class: message.role });
    const who = { user: "You", assistant: "Model", tool: "Tool" }[message.role];
    this.item.append(element("h2", { class: "unseen", text: who }));
    if (message.pictures?.length) this.item.append(element("div", { class: "pictures" }, ...shown(message.pictures)));
    this.item.append(...shownTexts(message.texts ?? []));
    if (message.role === "tool") this.item.append(folded(`${message.tool.name} returned`, element("pre", { class: "text", text: message.content })));
    else this.item.append(this.text);
    this.item.append(this.foot());
  }

  foot() {
    const { message, acts } = this, user = message.role === "user";
    this.steps = [["back", "Earlier version", -1], ["next", "Later version", 1]].map(([icon, label, step]) =>
      iconButton(icon, label, () => acts.turn(message, step)));
    this.place = element("span");
    this.versions = element("span", { class: "versions" }, this.steps[0], this.place, this.steps[1]);
    this.pace = element("span", { class: "pace" });
    this.copy = iconButton("copy", "Copy", (event) => copy(message.content, event.currentTarget, this.text));
    this.change = iconButton("edit", `Edit this ${user ? "message" : "answer"} as a new branch`, () => this.edit());
    this.changes = [this.change, ...(user ? [] : [iconButton("again", "Regenerate", () => acts.again(message))]), iconButton("delete", `Delete this ${user ? "message" : "answer"}`, () => acts.remove(message))];
    this.acting = element("div", { class: "acts" }, this.versions, this.copy, ...this.changes, this.pace);
    if (message.role === "tool") this.acting.hidden = true;
    return this.acting;
  }

  /** Draws all that can change: the text as far as it is there, its versions, what may be done now. */
  draw(busy, writes) {
    const { message } = this, [at, count] = standing(message);
    this.versions.hidden = count < 2;
    this.place.textContent = `${at} of ${count}`;
    this.steps[0].disabled = busy || at === 1;
    this.steps[1].disabled = busy || at === count;
    for (const button of this.changes) button.disabled = busy;
    this.acting.classList.toggle("waits", Boolean(writes));
    this.pace.textContent = message.pace ?? "";
    if (message.role === "user" && this.text.textContent !== message.content) this.text.textContent = message.content;
    if (message.role === "assistant") this.drawAnswer(writes);
    this.text.hidden = !message.content && !writes;
  }

  drawAnswer(writes) {
    const { message, text } = this;
    if (message.reasoning) this.drawReasoning(writes);
    if (message.tokens && !text.classList.contains("tokens")) text.replaceChildren();  // an answer that goes on in colours
    text.classList.toggle("tokens", Boolean(message.tokens));
    text.classList.toggle("busy", Boolean(writes));
    if (message.tokens) drawTokens(text, message.tokens);
    else if (this.drawn !== message.content || this.by !== render) render(text, message.content);
    [this.drawn, this.by] = [message.content, render];
    for (const [i, call] of (message.calls ?? []).entries()) this.drawCall(call, i, writes);
    this.notes?.forEach((one) => one.remove());
    this.notes = [];
    if (!writes) this.drawEnd();
  }

  drawReasoning(writes) {
    const thinks = writes && !this.message.content;
    this.reasoning ??= this.item.insertBefore(folded("", element("div", { class: "thought" })), this.text);
    this.reasoning.firstElementChild.textContent = thinks ? "Thinking…" : "Reasoning";
    this.reasoning.classList.toggle("thinks", thinks);
    const place = this.reasoning.lastElementChild;
    if (place.textContent.length !== this.message.reasoning.length) place.textContent = this.message.reasoning;
  }

  drawCall(call, i, writes) {
    this.calls ??= [];
    this.calls[i] ??= this.item.insertBefore(folded("", element("pre", { class: "arguments" })), this.acting);
    this.calls[i].firstElementChild.textContent = `Calls ${call.name || "a tool"}`;
    this.calls[i].lastElementChild.textContent = writes ? call.arguments : pretty(call.arguments);
  }

  drawEnd() {
    const { message, acting } = this;
    const why = message.error ?? WORDS[["repeats", "cut", "edited", "unfinished"].find((name) => message[name])];
    if (why) this.notes.push(element("div", { class: "row" }, element("p", message.error ? { class: "error", role: "alert", text: why } : { class: "help", text: why }), ...this.ways()));
    if (message.calls?.length && !message.children.length) this.notes.push(this.results());
    acting.before(...this.notes);
  }

  /** How an answer that broke off goes on: from where it is, or anew if nothing is there to continue. */
  ways() {
    const { message, acts } = this;
    if (message.children.length) return [];
    const goesOn = message.content && !message.calls?.length;
    return [element("button", { type: "button", class: "chip", text: goesOn ? "Continue" : "Try again", onclick: () => (goesOn ? acts.goOn(message) : acts.again(message)) })];
  }

  /** Fields for what the tools return, since this page runs none. */
  results() {
    const { message, acts } = this;
    const fields = message.calls.map(({ name }) => element("textarea", { rows: 2, "aria-label": `What ${name} returns`, placeholder: `What ${name} returns` }));
    const send = (event) => { event.preventDefault(); acts.returnResults(message, fields.map((field) => field.value)); };
    return element("form", { class: "results", onsubmit: send }, ...fields, element("button", { type: "submit", text: "Return to the model" }));
  }

  /** Puts a field in the message's place. What is sent from it becomes a branch beside the message. */
  edit() {
    const { message, text, acts, change, acting } = this, user = message.role === "user";
    const field = element("textarea", { rows: Math.min(16, message.content.split("\n").length + 2), "aria-label": user ? "Edited message" : "Edited answer" });
    field.value = message.content;
    const close = () => { form.replaceWith(text); acting.hidden = false; };
    const cancel = () => { close(); change.focus(); };
    const send = (event) => { event?.preventDefault(); if (user ? acts.resend(message, field.value) : acts.rewrite(message, field.value)) close(); };
    const form = element("form", { class: "edit", onsubmit: send }, field, element("div", { class: "row" },
      element("button", { type: "button", text: "Cancel", onclick: cancel }), element("button", { type: "submit", text: user ? "Send" : "Save" })));
    field.addEventListener("keydown", (event) => {
      if (composes(event)) return;
      if (event.key === "Escape") { event.stopPropagation(); cancel(); }
      if (event.key === "Enter" && (user ? !event.shiftKey : event.ctrlKey || event.metaKey)) send(event);
    });
    acting.hidden = true;
    text.replaceWith(form);
    field.focus();
  }
}

const folded = (title, inside) => element("details", {}, element("summary", { text: title }), inside);

function pretty(json) {
  try { return JSON.stringify(JSON.parse(json), null, 2); } catch { return json; }
}
