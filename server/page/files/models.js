// Which models the server has, which one is chosen, and what it can do.

import { ApiError, askAgain, get } from "./api.js";
import { showState, untilReady, watchServer } from "./connection.js";
import { byId, element, kept, keep, number } from "./dom.js";

/**
 * @typedef {{id: string, root: string, max_model_len: ?number, tasks: string[], quantization: ?string, state?: string, decides_by: ?string,
 *   media: ?{most: Record<string, number>, max_bytes: number}}} Card  A model in /v1/models; one of several has a state
 * @typedef {"chat" | "decide" | "compare" | "rank" | "classify" | "hear"} Ability  A view of the page that a model has a use for
 */

export const ABILITIES = ["chat", "decide", "compare", "rank", "classify", "hear"];

/** @type {Card[]} */
let cards = [];
/** What /info says of each model, by its name. */
const infos = new Map();
let changed = () => {};

/** The card of the chosen model; undefined while the server is not ready. */
export const chosen = () => cards.find((card) => card.id === byId("model").value) ?? cards[0];
export const model = () => chosen()?.id;

/** The card of the chosen model, for what cannot do without. Raises an Error while there is none. */
export function needed() {
  const card = chosen();
  if (!card) throw new Error("The server has not told its models yet.");
  return card;
}

export const infoOf = (card) => infos.get(card?.id) ?? {};

/** @returns {Set<Ability>} what a model has views for */
export function abilities(card) {
  const does = (task) => card.tasks.includes(task), kind = infoOf(card).model_type ?? {}, found = new Set();
  if (does("generate")) found.add("chat");
  if (card.decides_by) found.add("decide");
  if (does("embed")) found.add("compare");
  if (does("embed") || does("token_embed") || kind.reranker) found.add("rank");
  if (does("classify") && !kind.reranker) found.add("classify");
  if (does("transcription")) found.add("hear");
  return found;
}

/** What a model can do and how large its window is: its name and the facts, as parts of a line. */
export function facts(card) {
  const can = abilities(card), info = infoOf(card), found = [];
  if (can.has("chat")) found.push("writes text");
  if (card.media?.most.image) found.push("reads pictures");
  if (can.has("compare")) found.push("turns texts into vectors");
  if (can.has("rank")) found.push("ranks documents");
  if (can.has("classify")) found.push("classifies texts");
  if (can.has("hear")) found.push("writes what is said");
  if (card.max_model_len) found.push(`${number(card.max_model_len)} tokens of context`);
  const form = card.quantization ?? info.model_dtype;
  if (form) found.push(info.model_device_type ? `${form} on ${{ cpu: "CPU", cuda: "CUDA" }[info.model_device_type] ?? info.model_device_type}` : form);
  if (card.state && card.state !== "loaded") found.push("loaded when it is asked");
  return [element("b", { text: card.id }), ...found.flatMap((text) => ["\u00a0· ", element("span", { class: "fact", text })])];
}

/** A sentence that names another model of the server for what the chosen one does not do; "" if there is none. @param {(card: Card) => boolean} is */
export function otherWith(is, what) {
  const found = cards.find((card) => card.id !== model() && is(card));
  return found ? ` Choose ${found.id} above, which ${what}.` : "";
}

/** Chooses a model by its name, if the server has it. */
export function choose(name) {
  if (name === model() || !cards.some((card) => card.id === name)) return;
  byId("model").value = name;
  tell();
}

async function tell() {
  const card = chosen(), there = !card.state || card.state === "loaded";  // to ask what one can do would load it
  if (there && !infos.has(card.id)) {
    if (card.tasks.includes("generate")) changed(card, false);  // /info adds no more than words to a chat
    try { infos.set(card.id, await get("info", { "X-Model": card.id })); } catch { infos.set(card.id, {}); }
  }
  if (card === chosen()) changed(card, true);
}

/** The chosen model has answered: more may be known of it now than before it was loaded. */
export async function wasUsed() {
  if (!chosen().state || chosen().state === "loaded") return;
  cards = (await get("v1/models")).data;
  await tell();
}

/**
 * Asks for the models at once, since most servers are ready when their page is opened, and waits if this one is not.
 * @param {(card: Card, whole: boolean) => void} act  called with the chosen model, and whenever another one is chosen;
 *   of one that writes first without what /info says of it, and then as a whole
 */
export async function beginModels(act) {
  changed = act;
  const list = byId("model");
  list.addEventListener("change", () => { keep("model", list.value); tell(); });
  await fill();
  watchServer(() => { infos.clear(); fill(); });
}

/** Fills the list of models, when the server is ready. One that was started again may have others. */
async function fill() {
  for (;;) {
    try {
      cards = (await get("v1/models")).data;
      break;
    } catch (error) {
      if (error instanceof ApiError && error.status && error.status !== 503) return showState(error.message, "gone", "Try again", () => { showState(""); askAgain(); fill(); });
      await untilReady();
    }
  }
  const list = byId("model"), last = list.value || kept("model", "");
  list.replaceChildren(...cards.map((card) => element("option", { value: card.id, text: card.id })));
  list.hidden = cards.length < 2;
  byId("only-model").textContent = cards.length < 2 ? cards[0]?.id ?? "" : "";
  if (cards.some((card) => card.id === last)) list.value = last;
  await tell();
}
