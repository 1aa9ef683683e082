// The frame of the page: which view is shown, the sidebar, the theme, keys that work everywhere.

import { byId, composes, kept, keep, toast } from "./dom.js";
import { ABILITIES, abilities, beginModels, chosen } from "./models.js";
import { beginChat, showChat, stopAnswer, useModel } from "./chat/chat.js";
import { mark } from "./chat/conversations.js";

const NARROW = matchMedia("(max-width: 60rem)");
let leaveView = () => {};
let view = "";

/** The view and what stands behind its name in the address, such as a conversation. */
function place() {
  const [name, ...rest] = location.hash.slice(1).split("/");
  return [name, rest.join("/")];
}

function route() {
  const card = chosen();
  if (!card) return place()[0] === "live" ? open("live", "") : undefined;
  const can = abilities(card), [name, rest] = place();
  open(name === "live" || can.has(name) ? name : ABILITIES.find((one) => can.has(one)) ?? "live", rest);
}

function open(name, rest) {
  if (name !== view) leaveView();
  leaveView = () => {};
  view = name;
  for (const id of ["chat", "task", "live"]) byId(id).hidden = id !== (ABILITIES.slice(1).includes(name) ? "task" : name);
  byId("open-settings").hidden = name !== "chat";
  byId("settings").hidden ||= name !== "chat";
  for (const link of document.querySelectorAll(".views a")) {
    const here = link.hash === `#${name}` && !(name === "chat" && rest);
    if (here) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  if (name === "chat") showChat(rest);
  else mark("");
  if (name === "live") openLive();
  else if (name !== "chat") import("./tasks/tasks.js").then(({ showTask }) => view === name && showTask(name));
  if (NARROW.matches) showSide(false);
}

// The stream of live data is open only while somebody can see it.
async function openLive() {
  const { beginLive, endLive } = await import("./live/live.js");
  const look = () => (view === "live" && !document.hidden ? beginLive() : endLive());
  document.addEventListener("visibilitychange", look);
  leaveView = () => { document.removeEventListener("visibilitychange", look); endLive(); };
  look();
}

function onModel(card, whole) {
  const can = abilities(card);
  for (const item of document.querySelectorAll(".views [data-view]")) item.hidden = !can.has(item.dataset.view);
  byId("kept").hidden = !can.has("chat");
  useModel(card);
  if (!(whole && document.body.dataset.ready === card.id && (place()[0] || view) === view)) route();
  document.body.dataset.ready = card.id;
}

function showSide(is) {
  document.body.classList.toggle("no-side", !is);
  document.body.classList.toggle("side", is);
  byId("show-side").setAttribute("aria-expanded", is);
  byId("shade").hidden = !(is && NARROW.matches);
  if (!NARROW.matches) keep("side", is);
}

function beginSide() {
  showSide(!NARROW.matches && kept("side", true));
  byId("show-side").addEventListener("click", () => { showSide(true); byId("hide-side").focus(); });
  byId("hide-side").addEventListener("click", () => { showSide(false); byId("show-side").focus(); });
  byId("shade").addEventListener("click", () => showSide(false));
  byId("side").addEventListener("click", (event) => { if (NARROW.matches && event.target.closest("a")) showSide(false); });
  NARROW.addEventListener("change", () => showSide(!NARROW.matches && kept("side", true)));
}

function beginTheme() {
  const root = document.documentElement, saved = kept("theme", "");
  if (saved) root.dataset.theme = saved;
  byId("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    keep("theme", root.dataset.theme);
  });
}

function onKey(event) {
  if (composes(event)) return;
  const command = event.ctrlKey || event.metaKey;
  if (event.key === "Escape" && !document.querySelector("dialog[open], :popover-open")) {
    if (NARROW.matches && !document.body.classList.contains("no-side")) showSide(false);
    else if (view === "chat") stopAnswer();
  } else if (command && event.key === "k" && !byId("kept").hidden) {
    event.preventDefault();
    showSide(true);
    byId("search").focus();
  } else if (command && event.shiftKey && event.key.toLowerCase() === "o") {
    event.preventDefault();
    location.hash = "#chat";
    byId("input").focus();
  }
}

beginModels(onModel);  // before the page is built, which takes as long as the answer does
beginTheme();
beginSide();
beginChat();
byId("skip").addEventListener("click", (event) => { event.preventDefault(); byId("main").focus(); });
document.addEventListener("keydown", onKey);
addEventListener("hashchange", route);
addEventListener("unhandledrejection", (event) => {
  if (!/modul/i.test(event.reason?.message)) return;  // a view's script, which is gone with the server, or with its last version
  event.preventDefault();
  toast("A part of this page cannot be loaded.", "Load the page again", () => location.reload());
});
if (place()[0] === "live") route();
