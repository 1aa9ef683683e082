// Within a line of Markdown: emphasis, code, links, mathematics. Links go to web and mail addresses alone, and pictures from
// elsewhere are links too: showing them would tell their servers who reads.

import { element } from "../dom.js";
import { mathematics } from "./tex.js";

const SAFE = /^(https?:\/\/|mailto:)/i;
const PICTURE = /^data:image\/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/=]+$/;
const BARE = /^https?:\/\/[^\s<>"'`]*[^\s<>"'`.,;:!?)\]}*_~]/i;
const SPECIAL = /[\\`*_~[!$<h\n]/g;
const DEEPEST = 16;
const MARKS = { "***": ["strong", "em"], "**": ["strong"], "__": ["strong"], "~~": ["del"], "*": ["em"], _: ["em"] };

/** @returns {(Node | string)[]} */
export function inline(text, depth = 0) {
  if (depth > DEEPEST) return [text];
  const made = [], missing = new Set();  // closing marks that do not come any more: each is sought once
  let from = 0, at = 0, closing = null;
  const closes = (open) => (closing ??= closingBrackets(text)).get(open);
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const next = SPECIAL.exec(text);
    if (!next) break;
    at = next.index;
    const found = READ[text[at]](text, at, depth, missing, closes);
    if (!found) { at += 1; continue; }
    if (at > from) made.push(text.slice(from, at));
    made.push(...found[1]);
    from = at = found[0];
  }
  if (from < text.length) made.push(text.slice(from));
  return made;
}

/** The place of `mark` behind `at`, or -1. */
function seek(text, mark, at, missing) {
  if (missing.has(mark)) return -1;
  const found = text.indexOf(mark, at);
  if (found < 0) missing.add(mark);
  return found;
}

/** Whether what stands between two dollars is a formula that begins with a digit. */
const reckons = (inside, behind) => /^\d[^\n]*$/.test(inside) && /[\\^_=+*/<>-]/.test(inside) && !/\d/.test(behind ?? "");

/** What each character may begin: the end of it and its nodes, or null if it is text. */
const READ = {
  "\\": (text, at, _, missing) => {
    if (text[at + 1] === "\n") return [at + 2, [element("br")]];
    if (text[at + 1] === "(") {
      const end = seek(text, "\\)", at + 2, missing);
      return end < 0 ? null : [end + 2, [mathematics(text.slice(at + 2, end), false)]];
    }
    return /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "") ? [at + 2, [text[at + 1]]] : null;
  },
  "`": (text, at, _, missing) => {
    const ticks = /^`+/.exec(text.slice(at))[0], end = seek(text, ticks, at + ticks.length, missing);
    return end < 0 ? [at + ticks.length, [ticks]] : [end + ticks.length, [element("code", { text: text.slice(at + ticks.length, end).replace(/^ (.*) $/s, "$1") })]];
  },
  $: (text, at, _, missing) => {
    const wide = text[at + 1] === "$", mark = wide ? "$$" : "$";
    let end = seek(text, mark, at + mark.length, missing);
    if (!wide && /[\s\d]/.test(text[at + 1] ?? " ") && !reckons(text.slice(at + 1, Math.max(at, end)), text[end + 1])) return null;  // a price
    while (end > 0 && text[end - 1] === "\\") end = text.indexOf(mark, end + 1);
    if (end < 0 || /\s/.test(text[end - 1]) || (!wide && /\d/.test(text[end + 1] ?? ""))) return null;
    return [end + mark.length, [mathematics(text.slice(at + mark.length, end), wide)]];
  },
  "*": emphasis,
  _: emphasis,
  "~": emphasis,
  "[": (text, at, depth, _, closes) => link(text, at, depth, closes),
  "!": (text, at, _depth, _, closes) => (text[at + 1] === "[" ? picture(text, at, closes) : null),
  "<": (text, at) => {
    const found = /^<(https?:\/\/[^\s<>]+|mailto:[^\s<>]+)>/i.exec(text.slice(at, at + 2000));
    if (found) return [at + found[0].length, [anchor(found[1], [found[1]])]];
    const line = /^<br\s*\/?>/i.exec(text.slice(at, at + 8));
    return line ? [at + line[0].length, [element("br")]] : null;
  },
  h: (text, at) => {
    if (at && /\w/.test(text[at - 1])) return null;
    const found = BARE.exec(text.slice(at, at + 2000));
    return found ? [at + found[0].length, [anchor(found[0], [found[0]])]] : null;
  },
  "\n": (text, at) => (/ {2}$/.test(text.slice(Math.max(0, at - 2), at)) ? [at + 1, [element("br")]] : null),
};

function emphasis(text, at, depth, missing) {
  const run = /^(\*{1,3}|_{1,2}|~~)/.exec(text.slice(at, at + 3))?.[0];
  if (!run || !MARKS[run]) return null;
  if (/\s/.test(text[at + run.length] ?? " ") || (run[0] === "_" && /\w/.test(text[at - 1] ?? " "))) return null;
  let end = seek(text, run, at + run.length, missing);
  const closes = () => !/\s/.test(text[end - 1]) && !(run.length === 1 && (text[end + 1] === run || text[end - 1] === run))
    && !(run[0] === "_" && /\w/.test(text[end + run.length] ?? " "));
  for (let tries = 0; end >= 0 && !closes(); tries++) {
    const skip = run.length === 1 && text[end + 1] === run ? 2 : 1;  // ** within *
    end = tries < 50 ? text.indexOf(run, end + skip) : -1;
  }
  if (end <= at + run.length) return null;
  if (run.length === 2 && text[end + 2] === run[0] && text[end - 1] !== run[0]) end += 1;  // the last three of **a *b***
  const inside = inline(text.slice(at + run.length, end), depth + 1);
  return [end + run.length, [MARKS[run].reduce((parts, name) => [element(name, {}, ...parts)], inside)[0]]];
}

/** For each opening bracket of a text the place of the one that closes it, if one does. */
function closingBrackets(text) {
  const open = [], found = new Map();
  for (let at = 0; at < text.length; at++) {
    if (text[at] === "\\") at += 1;
    else if (text[at] === "[") open.push(at);
    else if (text[at] === "]" && open.length) found.set(open.pop(), at);
  }
  return found;
}

/** The text and the address of [text](address "title") that begins at a bracket; null if it is none. */
function bracketed(text, at, closes) {
  const close = closes(at);
  if (close === undefined || close - at > 2000 || text[close + 1] !== "(") return null;
  const found = /^\(\s*(?!\s)<?((?:[^\s()<>]|\([^\s()<>]*\))*)>?(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/.exec(text.slice(close + 1, close + 100_000));
  return found && { words: text.slice(at + 1, close), target: found[1], end: close + 1 + found[0].length };
}

function link(text, at, depth, closes) {
  const found = bracketed(text, at, closes);
  return found && [found.end, [anchor(found.target, inline(found.words, depth + 1))]];
}

function picture(text, at, closes) {
  const found = bracketed(text, at + 1, closes);
  if (!found) return null;
  if (PICTURE.test(found.target)) return [found.end, [element("img", { src: found.target, alt: found.words })]];
  return [found.end, [anchor(found.target, [`Picture: ${found.words || found.target}`])]];
}

/** A link if its address is one of the web or of mail; otherwise its text, with the address behind it. */
function anchor(target, parts) {
  if (SAFE.test(target)) return element("a", { href: target, target: "_blank", rel: "noopener noreferrer nofollow" }, ...parts);
  return element("span", {}, ...parts, target ? ` (${target})` : "");
}
