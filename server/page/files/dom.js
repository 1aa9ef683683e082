// Elements, icons, copying, and the small notices at the edge of the page. Nothing here, nor elsewhere, parses HTML.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/**
 * An element; `text` is its text, `on...` its listeners, all else its attributes. Attributes that are null are left out.
 * @param {string} name
 * @param {Record<string, any>} [attributes]
 * @param {...(Node | string)} children
 */
export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "text") made.textContent = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

export const icon = (name) => svg("svg", { "aria-hidden": "true" }, svg("use", { href: `#i-${name}` }));

/** A button that shows an icon alone; its label is its name and its title. */
export const iconButton = (name, label, act, more = {}) =>
  element("button", { type: "button", class: "icon", "aria-label": label, title: label, onclick: act, ...more }, icon(name));

/** Puts a text into the clipboard; `button` shows a tick for a moment. Without TLS browsers give no clipboard: `place` is marked then. */
export async function copy(text, button, place) {
  try {
    await navigator.clipboard.writeText(text);
    const shown = button.querySelector("use");
    if (shown) {
      shown.setAttribute("href", "#i-done");
      setTimeout(() => shown.setAttribute("href", "#i-copy"), 1200);
    }
    announce("Copied");
  } catch {
    const range = document.createRange();
    range.selectNodeContents(place);
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    toast("This browser gives no clipboard here: the text is marked.");
  }
}

/** Says a sentence to screen readers. */
export function announce(text) {
  byId("said").textContent = text;
}

/** Whether a key is for the input method, which shows words to choose from: Enter takes one, and Escape none. Safari says so by a code. */
export const composes = (event) => event.isComposing || event.keyCode === 229;

let hiding = 0;

/** Shows a notice for some seconds, with a button if there is something to be done. */
export function toast(text, label = "", act = () => {}) {
  const place = byId("toast"), close = () => { place.hidden = true; };
  place.replaceChildren(element("span", { text }));
  if (label) place.append(element("button", { type: "button", text: label, onclick: () => { close(); act(); } }));
  place.hidden = false;
  clearTimeout(hiding);
  hiding = setTimeout(close, 8000);
}

/** Has the browser save a file. */
export function save(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

// A browser's own words for numbers are loaded when they are first asked for, which takes 5 to 20 ms.
export const number = (value) => String(value).replace(/\B(?=(\d{3})+$)/g, ",");

/** A value that the browser keeps beyond the tab; `fallback` if it has none, or keeps nothing. */
export function kept(name, fallback) {
  try { return JSON.parse(localStorage.getItem(`facet-${name}`)) ?? fallback; } catch { return fallback; }
}

export function keep(name, value) {
  try { localStorage.setItem(`facet-${name}`, JSON.stringify(value)); } catch { /* a browser that keeps nothing */ }
}
