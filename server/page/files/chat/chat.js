// The chat: the conversation that is shown, sending, answering, branches, and keeping all of it.

import { address } from "../api.js";
import { announce, byId, composes, copy, number, toast } from "../dom.js";
import { choose, chosen, model, needed, wasUsed } from "../models.js";
import { sent, stream } from "./answers.js";
import { allRead, areWaiting, beginFiles, offerFiles, takeWaiting } from "./attached.js";
import { Tree } from "./branches.js";
import { beginConversations, keepConversation, mark, refresh, soughtWords } from "./conversations.js";
import { drawFirst } from "./first.js";
import { findIn, markWords } from "./found.js";
import { loadMarkdown, viewOf } from "./message.js";
import { beginSettings, fields, fillSettings, lastSystem, showDefaults, showSystem } from "./settings.js";
import { load, newId, onChange } from "./store.js";
import { beginTips } from "./tokens.js";

const KEEP_EVERY = 2000;
const NEARLY = 0.9;
/** Conversations that are shown or answered, by id. */
const alive = new Map();
let current = fresh();
let stale = "";  // the id of the conversation if another tab has changed it
let follows = true;  // whether the end of the conversation stays in sight while it grows

const acts = {
  again(message) {
    const { parent } = message;
    if (current.running || !readable()) return;
    if (!message.content && !message.children.length) current.tree.remove(message);  // nothing is lost
    answer(parent);
  },
  goOn: (message) => answer(message.parent, message),
  turn,
  resend,
  rewrite,
  remove,
  returnResults(message, results) {
    if (!readable()) return;
    let last = message;
    message.calls.forEach((call, i) => { last = current.tree.add(last, "tool", results[i], { tool: { id: call.id, name: call.name } }); });
    answer(last);
  },
};

function fresh() {
  const now = Date.now();
  return { id: newId(), title: "", created: now, changed: now, model: "", system: "", tree: new Tree(), running: null };
}

export function beginChat() {
  beginSettings((text) => { current.system = text; if (current.title) store(current); });
  beginConversations({ removed: forget, renamed: (id, title) => { if (alive.has(id)) alive.get(id).title = title; }, again: showChat });
  beginFiles(() => ({ pictures: current.tree.path.flatMap(({ pictures = [] }) => pictures), used: used() }));
  beginTips(byId("messages"));
  beginField();
  beginScrolling();
  byId("say").addEventListener("submit", (event) => { event.preventDefault(); say(); });
  byId("stop").addEventListener("click", stopAnswer);
  onChange((id) => { if (id === current.id) stale = id; renew(); });
  document.addEventListener("visibilitychange", renew);
  addEventListener("pagehide", () => { for (const one of alive.values()) if (one.running) { store(one); one.left = true; } });
  showSystem(current.system = lastSystem());
}

let filled = null;
const later = () => (filled ??= fill());

/** Brings what the page can be used without for a moment. */
async function fill() {
  fillSettings();
  showSystem(current.system);
  byId("show-code").addEventListener("click", showCode);
  refresh();
  await loadMarkdown();
}

function beginField() {
  const field = byId("input");
  const fit = () => {
    field.style.height = "auto";
    field.style.height = `${Math.min(field.scrollHeight, innerHeight * 0.4)}px`;
    byId("send").disabled = !field.value.trim() && !areWaiting();
  };
  field.addEventListener("input", fit);
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !composes(event)) { event.preventDefault(); say(); }
    if (event.key === "ArrowUp" && !field.value) {
      const last = current.tree.path.findLast(({ role }) => role === "user");
      if (last && !current.running) { event.preventDefault(); viewOf(last, acts).edit(); }
    }
  });
  byId("send").disabled = !field.value.trim();  // something may be written already
}

function beginScrolling() {
  const place = byId("scroll");
  place.addEventListener("scroll", () => {
    follows = place.scrollHeight - place.scrollTop - place.clientHeight < 60;
    byId("to-end").hidden = follows;
  });
  byId("to-end").addEventListener("click", () => place.scrollTo({ top: place.scrollHeight, behavior: "smooth" }));
}

/** The chosen model is another one. */
export function useModel(card) {
  setTimeout(() => later().then(show));
  offerFiles(card);
  showDefaults();
  drawFirst(card, (text) => { byId("input").value = text; say(); });
}

/** Shows a kept conversation, or a new one. */
export async function showChat(id) {
  if (id ? id !== current.id : current.title) {
    const found = id && (alive.get(id) ?? await opened(id));
    if (location.hash.slice("#chat/".length) !== id) return;  // another one was asked for meanwhile
    if (!current.running) alive.delete(current.id);
    current = found || fresh();
    if (found) { alive.set(id, found); choose(found.model); } else { current.system = lastSystem(); history.replaceState(null, "", "#chat"); }
    byId("messages").replaceChildren();
    byId("told").textContent = "";
    showSystem(current.system);
    follows = true;
  }
  mark(current.title ? current.id : "");
  const words = id ? soughtWords() : [];
  if (words.length) showFound(words);
  else show();
  if (!matchMedia("(pointer: coarse)").matches) byId("input").focus({ preventScroll: true });
}

/** Shows what another tab has made of the conversation, once it is seen: what is sent from here would undo it. */
async function renew() {
  const { id } = current;
  if (id !== stale || document.hidden || current.running) return;
  stale = "";
  const found = await opened(id);
  if (!found || id !== current.id || current.running) return;
  alive.set(id, current = found);
  showSystem(current.system);
  show();
}

async function opened(id) {
  try {
    const one = await load(id);
    return one && { ...one, tree: Tree.of(one.messages), running: null };
  } catch {
    return null;
  }
}

function forget(ids) {
  for (const one of [current, ...alive.values()].filter(({ id }) => ids.includes(id))) {
    one.gone = true;
    one.running?.abort();
    alive.delete(one.id);
  }
  if (current.gone) location.hash = "#chat";
}

function store(one) {
  if (one.gone) return;
  const { id, title, created, changed, model, system, tree } = one;
  keepConversation({ id, title, created, changed, model, system, messages: tree.plain });
}

/** Draws the branch that is shown. Messages that stay are not touched, so that nothing reads them out again. */
function show() {
  const list = byId("messages"), path = current.tree.path, busy = Boolean(current.running);
  const items = path.map((message) => viewOf(message, acts).item);
  const same = items.findIndex((item, i) => list.children[i] !== item);
  const stay = same < 0 ? items.length : same;
  while (list.children.length > stay) list.lastElementChild.remove();
  list.append(...items.slice(stay));
  for (const message of path) viewOf(message, acts).draw(busy, busy && message === path.at(-1));
  byId("first").hidden = path.length > 0;
  byId("stop").hidden = !busy;
  byId("send").hidden = busy;
  document.title = current.title ? `${current.title} · Facet` : "Facet";
  showContext();
  if (path.length) follow();
}

/** The tokens of the conversation, as the last answer's counts say. */
const used = () => current.tree.path.findLast((message) => message.used)?.used ?? 0;

function showContext() {
  const now = used(), most = chosen()?.max_model_len;
  byId("context").hidden = !(now && most);
  if (byId("context").hidden) return;
  const [bar, words] = byId("context").children, full = now > NEARLY * most;
  Object.assign(bar, { max: most, high: NEARLY * most, optimum: 0, value: now });
  words.textContent = `${number(now)} of ${number(most)} tokens${full ? ": nearly full" : ""}`;
  byId("context").title = "The part of the context length that this conversation takes. Delete messages or begin a new chat to have more room.";
}

/** Brings words that were searched for into sight, on whichever branch they are. */
function showFound(words) {
  const found = findIn(current.tree, words);
  if (found) current.tree.reveal(found);
  follows &&= !found;
  show();
  if (found) markWords(viewOf(found, acts).item, words).scrollIntoView({ block: "center" });
}

function follow() {
  const place = byId("scroll");
  if (follows) place.scrollTop = place.scrollHeight;
}

/** The next request. Raises an Error if no model is known, or a field of the settings is no JSON. */
const body = () => ({ model: needed().id, messages: sent(current.tree.path, current.system.trim()), ...fields() });

function readable() {
  try { body(); } catch (error) { byId("told").textContent = error.message; return false; }
  byId("told").textContent = "";
  return true;
}

async function say() {
  await allRead();
  const text = byId("input").value;
  if (!(text.trim() || areWaiting()) || current.running || !readable()) return;
  byId("input").value = "";
  answer(current.tree.add(current.tree.last, "user", text, takeWaiting()));
}

function turn(message, step) {
  const { steps } = viewOf(current.tree.turn(message, step), acts);
  show();
  store(current);
  (steps[step > 0 ? 1 : 0].disabled ? steps.find((button) => !button.disabled) : steps[step > 0 ? 1 : 0])?.focus();
}

function resend(message, text) {
  const { pictures, texts } = message;
  if (!(text.trim() || pictures || texts) || current.running || !readable()) return false;
  answer(current.tree.add(message.parent, "user", text, { pictures, texts }));
  byId("input").focus({ preventScroll: true });
  return true;
}

function rewrite(message, text) {
  if (current.running) return false;
  const { reasoning } = message;
  if (text !== message.content) current.tree.add(message.parent, "assistant", text, { reasoning, edited: true });
  show();
  store(current);
  byId("input").focus({ preventScroll: true });
  return true;
}

/** Takes one message out of the conversation; what followed it stays. */
function remove(message) {
  const one = current, before = one.tree.plain;
  one.tree.remove(message);
  const done = () => { if (one === current) show(); store(one); };
  done();
  byId("input").focus({ preventScroll: true });
  toast("The message is deleted.", "Undo", () => { if (!one.running) { one.tree = Tree.of(before); done(); } });
}

export function stopAnswer() {
  current.running?.abort();
}

/** Has the model answer what stands behind `parent`, the last message to be sent, as a new branch, or go on with an answer. */
async function answer(parent, begun = null) {
  if (!readable() || current.running) return;
  const one = current;
  parent.chosen = begun;
  const asked = { ...body(), ...(begun && { continue_final_message: true, add_generation_prompt: false }) };
  const message = begun ?? one.tree.add(parent, "assistant", "");
  Object.assign(message, { unfinished: true, error: undefined, cut: undefined, repeats: undefined, edited: undefined });  // and kept so, for the page may be closed
  begin(one);
  let due = false, keptAt = Date.now();
  const draw = () => {
    due = false;
    if (one !== current || !one.running) return;
    viewOf(message, acts).draw(true, true);
    byId("pace").textContent = message.pace;
    showContext();
    follow();
  };
  await stream(message, asked, one.running.signal, () => {
    if (!due) { due = true; requestAnimationFrame(draw); }
    if (Date.now() - keptAt > KEEP_EVERY) { keptAt = Date.now(); store(one); }
  });
  one.running = null;
  one.changed = Date.now();
  if (one === current) end(message); else alive.delete(one.id);
  if (!one.left) store(one);  // the browser ends the requests of a page that is left, which is no news
  one.left = false;
  if (!message.error) wasUsed();
}

function begin(one) {
  one.running = new AbortController();
  one.model = model();
  one.changed = Date.now();
  if (!one.title) {
    one.title = [...one.tree.path[0].content.trim().replace(/\s+/g, " ")].slice(0, 80).join("") || one.tree.path[0].texts?.[0].name || "Picture";
    history.pushState(null, "", `#chat/${one.id}`);
    dispatchEvent(new HashChangeEvent("hashchange"));
  }
  alive.set(one.id, one);
  follows = true;
  byId("toast").hidden = true;  // what could be undone lies behind the new message
  announce("The model answers.");
  show();
  store(one);
}

function end(message) {
  byId("pace").textContent = "";
  show();
  announce(message.error ?? message.content);
}

async function showCode() {
  const { LANGUAGES, withoutData } = await import("./code.js");
  const draw = (language) => {
    let text;
    try { text = LANGUAGES[language](address(), withoutData({ ...body(), stream: true })); } catch (error) { text = error.message; }
    byId("code-text").textContent = text;
    for (const one of byId("languages").children) one.setAttribute("aria-pressed", one.textContent === language);
  };
  byId("languages").replaceChildren(...Object.keys(LANGUAGES).map((name) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = name;
    button.addEventListener("click", () => draw(name));
    return button;
  }));
  draw("curl");
  byId("close-code").onclick = () => byId("code").close();
  byId("copy").onclick = (event) => copy(byId("code-text").textContent, event.currentTarget, byId("code-text"));
  byId("code").showModal();
}
