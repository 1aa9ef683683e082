// Mathematics in TeX as MathML, which browsers draw themselves: what models write, not all of LaTeX. What is not known is shown
// by its name; a formula that cannot be read at all is shown as it was written.

import { element } from "../dom.js";
import { ACCENTS, BELOW, BESIDE, BIG, BOUNDED, FUNCTIONS, LETTERS, OPERATORS, SPACES, STYLES } from "./tex_symbols.js";

const NAMESPACE = "http://www.w3.org/1998/Math/MathML";
const TOKEN = /\\[a-zA-Z]+\*?|\\[^a-zA-Z]|[{}^_&~']|\s+|\d+(?:[.,]\d+)*|[^]/gu;
const MOST = 10_000, DEEPEST = 60;
const FENCES = { pmatrix: "()", bmatrix: "[]", Bmatrix: "{}", vmatrix: "||", Vmatrix: "‖‖", cases: "{", rcases: "}" };
const TALL = { big: 1.2, Big: 1.8, bigg: 2.4, Bigg: 3 };

const m = (name, attributes = {}, ...children) => {
  const made = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
};
const mo = (text, attributes) => m("mo", attributes, text);
const row = (nodes) => (nodes.length === 1 ? nodes[0] : m("mrow", {}, ...nodes));
const space = (em) => m("mspace", { width: `${em}em` });

/** A formula as an element; `wide` is one with a line of its own. */
export function mathematics(source, wide) {
  try {
    if (source.length > MOST) throw new RangeError("too long");
    const reader = new Reader(source, wide), nodes = reader.rows(() => false);
    return m("math", wide ? { display: "block" } : {}, ...nodes);
  } catch {
    return element("code", { text: source });
  }
}

class Reader {
  constructor(source, wide) {
    this.tokens = source.match(TOKEN) ?? [];
    this.at = 0;
    this.wide = wide;
    this.depth = 0;
  }

  get next() {
    return this.tokens[this.at];
  }

  skipSpace() {
    while (this.next !== undefined && /^\s/.test(this.next)) this.at += 1;
  }

  /** Nodes up to a token that ends them, or the formula's end; lines that are broken become a table. */
  rows(ends) {
    const lines = [this.nodes((token) => ends(token) || token === "\\\\")];
    while (this.next === "\\\\") {
      this.at += 1;
      lines.push(this.nodes((token) => ends(token) || token === "\\\\"));
    }
    return lines.length === 1 ? lines[0] : [m("mtable", { class: "lines" }, ...lines.map((line) => m("mtr", {}, m("mtd", {}, ...line))))];
  }

  nodes(ends) {
    if (++this.depth > DEEPEST) throw new RangeError("too deep");
    const made = [];
    for (this.skipSpace(); this.next !== undefined && !ends(this.next); this.skipSpace()) {
      if (FUNCTIONS.has(this.next.slice(1)) && made.length && made.at(-1).localName !== "mo") made.push(space(0.167));
      const one = this.withScripts();
      if (one) made.push(one);
    }
    this.depth -= 1;
    return made;
  }

  withScripts() {
    const lone = this.next === "^" || this.next === "_";
    let base = lone ? m("mrow") : this.atom();
    if (!base) return null;
    const { limits, called } = base;
    let above = null, below = null;
    for (this.skipSpace(); ["^", "_", "'"].includes(this.next) || this.next === "\\limits"; this.skipSpace()) {
      const mark = this.tokens[this.at++];
      if (mark === "'") above = row([...(above ? [above] : []), mo("′")]);
      else if (mark === "_") below = this.argument();
      else if (mark === "^") above = above ? row([above, this.argument()]) : this.argument();
    }
    const names = limits && this.wide ? ["munderover", "munder", "mover"] : ["msubsup", "msub", "msup"];
    if (above && below) base = m(names[0], {}, base, below, above);
    else if (below) base = m(names[1], {}, base, below);
    else if (above) base = m(names[2], {}, base, above);
    return called && this.next !== undefined && !/^([([{|)\]},.]|\\(left|big|right|\}|\\))/.test(this.next) ? m("mrow", {}, base, space(0.167)) : base;
  }

  /** What a command takes: a group, or the next atom. */
  argument() {
    this.skipSpace();
    if (this.next === undefined || this.next === "}") return m("mrow");
    if (/^\d\d/.test(this.next)) {  // x^23 is x^2 3
      const [digit, ...rest] = this.next;
      this.tokens[this.at] = rest.join("");
      return m("mn", {}, digit);
    }
    return this.atom() ?? m("mrow");
  }

  group() {
    const inside = this.nodes((token) => token === "}");
    this.at += 1;
    return row(inside);
  }

  /** The text of a group, as it was written. */
  raw() {
    this.skipSpace();
    if (this.next !== "{") return this.tokens[this.at++] ?? "";
    let text = "", open = 0;
    for (; this.at < this.tokens.length; this.at++) {
      const token = this.next;
      if (token === "}" && --open === 0) break;
      if (open) text += token;
      if (token === "{") open += 1;
    }
    this.at += 1;
    return text;
  }

  /** What stands in brackets before an argument, if anything does. */
  optional() {
    this.skipSpace();
    if (this.next !== "[") return null;
    this.at += 1;
    const inside = this.nodes((token) => token === "]");
    this.at += 1;
    return row(inside);
  }

  atom() {
    const token = this.tokens[this.at++];
    if (token === "{") return this.group();
    if (token === "}") return null;
    if (token === "~") return space(0.333);
    if (token === "&") return space(0.5);
    if (token === "'") return mo("′");
    if (/^\d/.test(token)) return m("mn", {}, token);
    if (token[0] === "\\" && token.length > 1) return this.command(token.slice(1));
    if (/[\p{L}∂∞]/u.test(token)) return m("mi", {}, token);
    return mo(token === "-" ? "−" : token === "*" ? "∗" : token, /[()[\]|/]/.test(token) ? { stretchy: "false" } : {});
  }

  command(name) {
    if (name in LETTERS) return m("mi", /^[A-Z]/.test(name) ? { mathvariant: "normal" } : {}, LETTERS[name]);
    if (name in BIG) return Object.assign(mo(BIG[name]), { limits: !BESIDE.has(name) });
    if (FUNCTIONS.has(name)) return Object.assign(m("mi", {}, name.replace(/^(lim|arg)(?=sup|inf|max|min)/, "$1\u2009")), { limits: BOUNDED.has(name), called: true });
    if (name in OPERATORS) return mo(OPERATORS[name], /^[lr]?(vert|Vert|angle|ceil|floor|brac)|^[|{}]/.test(name) ? { stretchy: "false" } : {});
    if (name in SPACES) return space(SPACES[name]);
    if (name in ACCENTS) return Object.assign(m("mover", { accent: "true" }, this.argument(), mo(ACCENTS[name], { stretchy: String(/^(wide|over)/.test(name)) })), { limits: name === "overbrace" });
    if (name in BELOW) return Object.assign(m("munder", {}, this.argument(), mo(BELOW[name], { stretchy: "true" })), { limits: name === "underbrace" });
    if (name in STYLES) return styled(this.argument(), STYLES[name]);
    return Object.hasOwn(COMMANDS, name) ? COMMANDS[name](this, name) : this.other(name);
  }

  other(name) {
    const tall = /^(big|Big|bigg|Bigg)[lrm]?$/.exec(name);
    if (tall) return mo(this.fence(), { minsize: `${TALL[tall[1]]}em`, maxsize: `${TALL[tall[1]]}em` });
    if (/^(text|mbox|textrm|textit|textbf|textsf|texttt|hbox)$/.test(name)) return m("mtext", name === "textbf" ? { class: "bold" } : {}, this.raw().replaceAll(/^ | $/g, "\u00a0"));
    if (/^(displaystyle|textstyle|scriptstyle|limits|nolimits|nonumber|notag|hline|rm|it|bf|left|right|middle|allowbreak|noindent)$/.test(name)) return null;
    return m("mtext", { class: "unknown" }, `\\${name}`);
  }

  /** The delimiter that comes next, as a character; a dot is none. */
  fence() {
    this.skipSpace();
    const token = this.tokens[this.at++] ?? ".", name = token.slice(1);
    return token === "." ? "" : token[0] === "\\" ? OPERATORS[name] ?? LETTERS[name] ?? name : token;
  }

  fenced() {
    const open = this.fence(), inside = [], ends = (token) => token === "\\right" || token === "\\middle";
    inside.push(...this.nodes(ends));
    while (this.next === "\\middle") {
      this.at += 1;
      inside.push(mo(this.fence(), { stretchy: "true" }), ...this.nodes(ends));
    }
    this.at += 1;
    return m("mrow", {}, mo(open, { stretchy: "true" }), ...inside, mo(this.fence(), { stretchy: "true" }));
  }

  environment() {
    const name = this.raw().replace("*", "");
    if (name === "array") this.raw();
    const ends = (token) => token === "\\end", cell = (token) => ends(token) || token === "&" || token === "\\\\", lines = [[]];
    while (this.next !== undefined && !ends(this.next)) {
      lines.at(-1).push(m("mtd", {}, ...this.nodes(cell)));
      if (this.next === "&") this.at += 1;
      else if (this.next === "\\\\") { this.at += 1; if (/^\s*\[/.test(this.next ?? "")) this.optional(); lines.push([]); }
    }
    this.at += 1;
    this.raw();
    if (lines.at(-1).every((one) => !one.childNodes.length)) lines.pop();
    const kind = /align|split|eqnarray/.test(name) ? "aligned" : /cases/.test(name) ? "cases" : /gather|equation|multline/.test(name) ? "lines" : "matrix";
    const table = m("mtable", { class: kind, ...(kind === "matrix" ? {} : { displaystyle: "true" }) }, ...lines.map((cells) => m("mtr", {}, ...cells)));
    const fences = FENCES[name];
    if (!fences) return table;
    const open = name === "rcases" ? "" : fences[0], close = name === "cases" ? "" : fences.at(-1);
    return m("mrow", {}, mo(open, { stretchy: "true" }), table, mo(close, { stretchy: "true" }));
  }
}

const fraction = (reader, attributes = {}) => m("mfrac", attributes, reader.argument(), reader.argument());

/** @type {Record<string, (reader: Reader, name: string) => ?Element>} */
const COMMANDS = {
  frac: (reader) => fraction(reader),
  dfrac: (reader) => m("mstyle", { displaystyle: "true" }, fraction(reader)),
  cfrac: (reader) => m("mstyle", { displaystyle: "true" }, fraction(reader)),
  tfrac: (reader) => m("mstyle", { displaystyle: "false" }, fraction(reader)),
  binom: (reader) => m("mrow", {}, mo("("), fraction(reader, { linethickness: "0" }), mo(")")),
  sqrt: (reader) => { const root = reader.optional(), inside = reader.argument(); return root ? m("mroot", {}, inside, root) : m("msqrt", {}, inside); },
  left: (reader) => reader.fenced(),
  begin: (reader) => reader.environment(),
  mathrm: (reader) => upright(reader.argument()),
  mathit: (reader) => reader.argument(),
  operatorname: (reader) => Object.assign(m("mi", { mathvariant: "normal" }, reader.raw()), { called: true }),
  "operatorname*": (reader) => Object.assign(m("mi", { mathvariant: "normal" }, reader.raw()), { called: true, limits: true }),
  overset: (reader) => { const over = reader.argument(); return m("mover", {}, reader.argument(), over); },
  stackrel: (reader) => { const over = reader.argument(); return m("mover", {}, reader.argument(), over); },
  underset: (reader) => { const under = reader.argument(); return m("munder", {}, reader.argument(), under); },
  xrightarrow: (reader) => { const under = reader.optional(), over = reader.argument(); return under ? m("munderover", {}, mo("→"), under, over) : m("mover", {}, mo("→", { stretchy: "true" }), over); },
  xleftarrow: (reader) => m("mover", {}, mo("←", { stretchy: "true" }), reader.argument()),
  boxed: (reader) => m("mrow", { class: "boxed" }, reader.argument()),
  phantom: (reader) => m("mphantom", {}, reader.argument()),
  substack: (reader) => { reader.skipSpace(); reader.at += 1; const inside = reader.rows((token) => token === "}"); reader.at += 1; return row(inside); },
  not: (reader) => { const next = reader.argument(); next.textContent += "\u0338"; return next; },
  bmod: () => m("mrow", {}, space(0.222), m("mi", {}, "mod"), space(0.222)),
  pmod: (reader) => m("mrow", {}, space(0.5), mo("("), m("mi", {}, "mod"), space(0.333), reader.argument(), mo(")")),
  tag: (reader) => m("mtext", {}, `\u2003(${reader.raw()})`),
  label: (reader) => { reader.raw(); return null; },
  color: (reader) => { reader.raw(); return null; },
};

function upright(node) {
  const letters = node.localName === "mrow" && [...node.children].every(({ localName }) => localName === "mi");
  if (letters && node.children.length) return m("mi", { mathvariant: "normal" }, node.textContent);
  for (const one of node.localName === "mi" ? [node] : node.querySelectorAll("mi")) one.setAttribute("mathvariant", "normal");
  return node;
}

/** Has the letters and digits of a node in another style. */
function styled(node, [capital, small, digit, elsewhere]) {
  const leaves = ["mi", "mn"].includes(node.localName) ? [node] : node.querySelectorAll("mi, mn");
  const change = (one) => elsewhere[one] ?? (/[A-Z]/.test(one) ? shifted(one, "A", capital) : /[a-z]/.test(one) ? shifted(one, "a", small) : /\d/.test(one) && digit ? shifted(one, "0", digit) : one);
  for (const leaf of leaves) {
    leaf.textContent = [...leaf.textContent].map(change).join("");
    leaf.setAttribute("mathvariant", "normal");
  }
  return node;
}

const shifted = (one, from, to) => String.fromCodePoint(to + one.charCodeAt(0) - from.charCodeAt(0));
