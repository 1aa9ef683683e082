// The list of conversations at the side: search, rename, export, import, delete.

import { announce, byId, composes, element, iconButton, save, toast } from "../dom.js";
import { asMarkdown, read } from "./files.js";
import { heads, load, loadAll, onChange, put, remove } from "./store.js";

const DAY = 86_400_000, BEFORE = 20, BEHIND = 100;
/** @type {?import("./store.js").Head[]} */
let list = null;  // until it was read
let open = "";
let works = true;
let events = { removed: (_ids) => {}, renamed: (_id, _title) => {}, again: (_id) => {} };

/** @param {typeof events} told  what the chat wants to know of */
export function beginConversations(told) {
  events = told;
  byId("search").addEventListener("input", draw);
  byId("search").addEventListener("keydown", (event) => {
    if (composes(event)) return;
    if (event.key === "Escape" && byId("search").value) { event.stopPropagation(); byId("search").value = ""; draw(); }
    if (event.key === "Enter") byId("conversations").querySelector("a")?.click();
  });
  onChange(refresh);
}

/** Marks the conversation that is open. */
export function mark(id) {
  open = id;
  draw();
}

/** Keeps a conversation, and shows it in the list. A browser that keeps nothing is told of once. */
export async function keepConversation(one) {
  try { await put(one); } catch (error) {
    if (works) toast(`This browser keeps no conversations: ${error?.message ?? "it refuses to"}`);
    works = false;
    return;
  }
  await refresh();
}

export async function refresh() {
  try { list = await heads(); } catch { list = []; }
  draw();
}

/** The words that are searched for, in small letters. */
export const soughtWords = () => byId("search").value.trim().toLowerCase().split(/\s+/).filter(Boolean);

function draw() {
  if (list === null || byId("conversations").querySelector("input")) return;  // one is being renamed, at whose end it is drawn
  const sought = soughtWords(), place = byId("conversations");
  const found = list.filter(({ low }) => sought.every((word) => low.includes(word)));
  if (!sought.length) globalThis.CSS?.highlights?.delete("found");
  const groups = grouped(found);
  const made = element("div", {}, ...[...groups].flatMap(([age, some]) => [element("h2", { text: age }), element("ul", {}, ...some.map((head) => row(head, sought)))]));
  if (!found.length) made.append(element("p", { class: "help", text: sought.length ? "No conversation has these words." : "Conversations will be listed here." }));
  if (!place.firstElementChild?.isEqualNode(made)) place.replaceChildren(made);  // while an answer comes, nobody loses the focus
}

function grouped(some) {
  const groups = new Map();
  for (const one of some) groups.set(ageOf(one), [...(groups.get(ageOf(one)) ?? []), one]);
  return groups;
}

function ageOf({ changed }) {
  const today = new Date().setHours(0, 0, 0, 0);
  return changed >= today ? "Today" : changed >= today - DAY ? "Yesterday" : changed >= today - 7 * DAY ? "Last seven days" : "Earlier";
}

function row(head, sought) {
  const again = () => { if (head.id === open) events.again(head.id); };  // its address is there already
  const link = element("a", { href: `#chat/${head.id}`, title: head.title, "aria-current": head.id === open && "page", "data-id": head.id, onclick: again }, head.title, ...where(head, sought));
  const more = iconButton("more", `More of ${head.title}`, (event) => showMenu(head, event.currentTarget), { "aria-haspopup": "menu", class: "icon small" });
  return element("li", {}, link, more);
}

/** The words around the first that is found in what was written. */
function where({ title, words, low }, sought) {
  const [at, word] = sought.map((word) => [low.indexOf(word, title.length), word]).filter(([at]) => at >= 0).sort(([a], [b]) => a - b)[0] ?? [-1, ""];
  if (at < 0) return [];
  const line = low.lastIndexOf("\n", at) + 1, near = at - line > BEFORE ? low.indexOf(" ", at - BEFORE) + 1 : line, from = near && near <= at ? near : at, end = at + word.length;
  return [element("span", { class: "where" }, from > line ? "… " : "", words.slice(from, at), element("mark", { text: words.slice(at, end) }), words.slice(end, end + BEHIND))];
}

function showMenu(head, button) {
  const menu = byId("menu");
  const item = (text, act) => element("button", { type: "button", role: "menuitem", text, onclick: () => { menu.hidePopover(); act(); } });
  menu.replaceChildren(
    item("Rename", () => rename(head)),
    item("Export as Markdown", async () => { const one = await load(head.id); save(`${fileName(one.title)}.md`, asMarkdown(one), "text/markdown"); }),
    item("Export as JSON", async () => save(`${fileName(head.title)}.json`, JSON.stringify([await load(head.id)], null, 1), "application/json")),
    item("Delete", () => drop([head.id])),
  );
  menu.onkeydown = (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const items = [...menu.children], at = items.indexOf(document.activeElement);
    items[(at + step + items.length) % items.length].focus();
  };
  menu.showPopover();
  const box = button.getBoundingClientRect();
  menu.style.left = `${Math.min(box.left, innerWidth - menu.offsetWidth - 8)}px`;
  menu.style.top = `${box.bottom + menu.offsetHeight + 8 < innerHeight ? box.bottom + 4 : box.top - menu.offsetHeight - 4}px`;
  menu.firstElementChild.focus();
}

const fileName = (title) => title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "conversation";

function rename(head) {
  const link = byId("conversations").querySelector(`[data-id="${head.id}"]`);
  const field = element("input", { "aria-label": "New title", value: head.title, maxlength: 120 });
  let over = false;
  const end = async (title) => {
    if (over) return;
    over = true;
    field.replaceWith(link);
    const whole = title && title !== head.title && await load(head.id);
    if (whole) { await put({ ...whole, title }); events.renamed(head.id, title); announce(`Renamed to ${title}`); }
    await refresh();
    byId("conversations").querySelector(`[data-id="${head.id}"]`)?.focus();
  };
  field.addEventListener("keydown", (event) => {
    if (composes(event)) return;
    if (event.key === "Enter") end(field.value.trim());
    if (event.key === "Escape") { event.stopPropagation(); end(""); }
  });
  field.addEventListener("blur", () => end(field.value.trim()));
  link.replaceWith(field);
  field.select();
}

async function drop(ids) {
  const gone = (await loadAll()).filter(({ id }) => ids.includes(id));
  if (!gone.length) return;
  await remove(ids);
  events.removed(ids);
  await refresh();
  byId("search").focus();
  toast(gone.length === 1 ? `Deleted: ${gone[0].title}` : `${gone.length} conversations are deleted.`, "Undo", async () => {
    for (const one of gone) await put(one);
    await refresh();
  });
}

export const dropAll = () => drop(list.map(({ id }) => id));

export async function exportAll() {
  save("facet-conversations.json", JSON.stringify(await loadAll(), null, 1), "application/json");
}

/** Reads conversations of an exported file; says how many, or why none. */
export async function importFile(file) {
  try {
    const some = read(await file.text());
    for (const one of some) await put(one);
    toast(some.length === 1 ? `Imported: ${some[0].title}` : `${some.length} conversations are imported.`);
  } catch (error) {
    toast(`${file.name} cannot be imported: ${error.message}`);
  }
  await refresh();
}
