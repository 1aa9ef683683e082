// Markdown as elements: headings, lists, tables, quotes, code with copy buttons, and mathematics. What it does not know, HTML
// above all, stays text: elements are made by name, and no text is ever parsed as HTML.

import { copy, element, icon } from "../dom.js";
import { coloured } from "./highlight.js";
import { inline } from "./inline.js";
import { mathematics } from "./tex.js";

// Models write these lines, and anybody's words are in them: no pattern may divide one run of characters in several ways.
const FENCE = /^ {0,3}(`{3,}(?!`)|~{3,}(?!~))([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s/;
const RULE = /^ {0,3}([-*_])\s*(?:\1\s*){2,}$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)/;
const QUOTE = /^ {0,3}> ?/;
const DIVIDER = /^\s*(?:\|\s*)?:?-+:?\s*(?:\|\s*:?-+:?\s*)*(?:\|\s*)?$/;
const MATH = [["$$", "$$"], ["\\[", "\\]"]];
const DEEPEST = 12;
const FILLED = 20;  // cells of a line of a table that has fewer: a wide head and many short lines would be millions

/** @type {WeakMap<Element, string[]>} The sources of the blocks that an element shows. */
const drawn = new WeakMap();

/** Shows a text that may have grown since the last time: blocks that have stayed are not touched. */
export function render(place, source) {
  if (!drawn.has(place)) place.replaceChildren();
  const blocks = blocksOf(source.split("\n")), before = drawn.get(place) ?? [];
  const same = blocks.findIndex(({ source }, i) => source !== before[i]);
  const stay = same < 0 ? blocks.length : same;
  while (place.children.length > stay) place.lastElementChild.remove();
  place.append(...blocks.slice(stay).map(({ make }) => make()));
  drawn.set(place, blocks.map(({ source }) => source));
}

/** Cuts lines into blocks: the source of each, and a function that makes its element. */
function blocksOf(lines, depth = 0) {
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) { at += 1; continue; }
    const [end, make] = blockAt(lines, at, depth);
    blocks.push({ source: lines.slice(at, end).join("\n"), make });
    at = end;
  }
  return blocks;
}

const children = (lines, depth) => blocksOf(lines, depth + 1).map(({ make }) => make());

/** The end of the block that begins at a line, and what makes its element. */
function blockAt(lines, at, depth) {
  const line = lines[at], heading = HEADING.exec(line);
  if (FENCE.test(line)) return codeAt(lines, at);
  if (heading) return [at + 1, () => element(`h${Math.min(6, heading[1].length + 2)}`, {}, ...inline(headingText(line.slice(heading[0].length))))];
  if (RULE.test(line)) return [at + 1, () => element("hr")];
  const math = MATH.findIndex(([open]) => line.trim().startsWith(open));
  if (math >= 0) { const found = mathAt(lines, at, math); if (found) return found; }
  if (depth < DEEPEST && QUOTE.test(line)) return quoteAt(lines, at, depth);
  if (depth < DEEPEST && ITEM.test(line)) return listAt(lines, at, depth);
  if (line.includes("|") && DIVIDER.test(lines[at + 1] ?? "") && lines[at + 1].includes("-")) return tableAt(lines, at);
  return paragraphAt(lines, at, depth);
}

/** What a heading says, without the marks that may close it. */
function headingText(text) {
  const said = text.trim();
  let end = said.length;
  while (said[end - 1] === "#") end -= 1;
  return said.slice(0, end).trimEnd();
}

function codeAt(lines, at) {
  const [, fence, words] = FENCE.exec(lines[at]), indent = /^ */.exec(lines[at])[0].length, [language] = words.trim().split(/\s/);
  const closes = (line) => { const found = FENCE.exec(line); return found?.[1].startsWith(fence) && !found[2].trim(); };
  let end = at + 1;
  while (end < lines.length && !closes(lines[end])) end += 1;
  const text = lines.slice(at + 1, end).map((line) => line.slice(Math.min(indent, /^ */.exec(line)[0].length))).join("\n");
  return [Math.min(lines.length, end + 1), () => code(text, language)];
}

function code(text, language) {
  const shown = element("code", {}, ...coloured(text, language.toLowerCase()));
  const button = element("button", { type: "button", class: "plain", "aria-label": "Copy the code", onclick: () => copy(text, button, shown) }, icon("copy"), "Copy");
  return element("figure", { class: "code" }, element("figcaption", {}, element("span", { text: language || "text" }), button),
    element("pre", { tabindex: 0, "aria-label": `Code, ${language || "text"}`, role: "region" }, shown));
}

/** @type {WeakMap<string[], number[][]>} For each kind of formula, the first line from each on in which one closes. */
const closings = new WeakMap();

function closingsOf(lines) {
  if (!closings.has(lines)) closings.set(lines, MATH.map(([, close]) => {
    const found = new Array(lines.length + 1).fill(lines.length);
    for (let at = lines.length - 1; at >= 0; at -= 1) found[at] = lines[at].includes(close) ? at : found[at + 1];
    return found;
  }));
  return closings.get(lines);
}

function mathAt(lines, at, kind) {
  const [open, close] = MATH[kind], first = lines[at].trim().slice(open.length);
  const end = first.includes(close) ? at : closingsOf(lines)[kind][at + 1];
  if (end >= lines.length) return null;
  const last = end === at ? first : lines[end], stop = last.indexOf(close), rest = last.slice(stop + close.length).trim();
  if (rest && !/^[.,;:]$/.test(rest)) return null;
  const text = [...(end === at ? [] : [first, ...lines.slice(at + 1, end)]), last.slice(0, stop)].join("\n");
  return [end + 1, () => element("div", { class: "math", tabindex: 0, role: "group", "aria-label": "Formula" }, mathematics(text, true), rest)];
}

function quoteAt(lines, at, depth) {
  let end = at;
  while (end < lines.length && (QUOTE.test(lines[end]) || (lines[end].trim() && end > at && !ITEM.test(lines[end])))) end += 1;
  const inside = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return [end, () => element("blockquote", {}, ...children(inside, depth))];
}

/** A list: its items are the lines with its kind of mark, each with all that is indented below. */
function listAt(lines, at, depth) {
  const [, lead, mark] = ITEM.exec(lines[at]), ordered = /\d/.test(mark), items = [];
  let end = at, loose = false;
  while (end < lines.length) {
    const found = ITEM.exec(lines[end]), indent = /^\s*/.exec(lines[end])[0].length;
    if (!lines[end].trim()) {
      const next = lines[end + 1] ?? "", goes = /^\s*/.exec(next)[0].length > lead.length || (ITEM.exec(next)?.[1].length === lead.length && /\d/.test(ITEM.exec(next)[2]) === ordered);
      if (!next.trim() || !goes) break;
      items.at(-1).push("");
      loose ||= ITEM.test(next) && indent <= lead.length;
    } else if (found && found[1].length <= lead.length + 1 && found[1].length >= lead.length && /\d/.test(found[2]) === ordered && !RULE.test(lines[end])) {
      items.push([lines[end].slice(found[0].length)]);
    } else if (indent > lead.length) {
      items.at(-1).push(lines[end].slice(Math.min(indent, ITEM.exec(lines[at])[0].length)));
    } else if (lines[end - 1].trim() && !found && !FENCE.test(lines[end]) && !HEADING.test(lines[end]) && !RULE.test(lines[end])) {
      items.at(-1).push(lines[end].trim());
    } else break;
    end += 1;
  }
  const start = ordered && Number.parseInt(mark, 10) !== 1 ? { start: Number.parseInt(mark, 10) } : {};
  return [end, () => element(ordered ? "ol" : "ul", start, ...items.map((inside) => listItem(inside, loose, depth)))];
}

function listItem(inside, loose, depth) {
  const task = /^\[([ xX])\]\s+/.exec(inside[0]);
  if (task) inside = [inside[0].slice(task[0].length), ...inside.slice(1)];
  const parts = children(inside, depth);
  const tight = !loose && parts[0]?.tagName === "P" ? [...parts.shift().childNodes] : [];
  const box = task ? [element("input", { type: "checkbox", disabled: true, checked: task[1] !== " ", "aria-label": task[1] === " " ? "Not done" : "Done" })] : [];
  return element("li", task ? { class: "checked" } : {}, ...box, ...tight, ...parts);
}

function tableAt(lines, at) {
  const head = cells(lines[at]), sides = cells(lines[at + 1]).map((one) => (/^:-*:$/.test(one) ? "middle" : one.endsWith(":") ? "right" : null));
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|") && lines[end].trim()) end += 1;
  const row = (kind, texts) => element("tr", {}, ...head.slice(0, Math.max(FILLED, texts.length)).map((_, i) => element(kind, { class: sides[i], scope: kind === "th" && "col" }, ...inline(texts[i] ?? ""))));
  const make = () => element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table" }, element("table", {},
    element("thead", {}, row("th", head)), element("tbody", {}, ...lines.slice(at + 2, end).map((line) => row("td", cells(line))))));
  return [end, make];
}

/** The cells of a table's line; a bar within code, or behind a backslash, is none of its bars. */
function cells(line) {
  const trimmed = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return (trimmed.match(/(?:\\.|`[^`]*`|[^|])+|(?<=\|)(?=\|)/g) ?? [""]).map((cell) => cell.replaceAll("\\|", "|").trim());
}

function paragraphAt(lines, at, depth) {
  const ends = (line) => !line.trim() || FENCE.test(line) || HEADING.test(line) || RULE.test(line) || MATH.some(([open]) => line.trim().startsWith(open))
    || (depth < DEEPEST && (QUOTE.test(line) || (ITEM.test(line) && !/^\s*\d+[.)]/.test(line)) || /^\s*1[.)]\s/.test(line)));
  let end = at + 1;
  while (end < lines.length && !ends(lines[end]) && !(lines[end].includes("|") && DIVIDER.test(lines[end + 1] ?? ""))) end += 1;
  return [end, () => element("p", {}, ...inline(lines.slice(at, end).map((line) => line.trimStart()).join("\n")))];
}
