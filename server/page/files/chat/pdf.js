// Reads the text of PDF files: pages in their order, a new line or a space where the text moves on.

const SLICE = 30, WIDE = -180, UNKNOWN = "\uFFFD", LIGATURES = ["ff", "fi", "fl", "ffi", "ffl"];
let since = 0;  // when the page last went on
const NEXT = /(?:[\0\s]|%[^\r\n]*)*(?:(\d+)\s+\d+\s+R(?![\w'"*])|(<<|>>|[[\]{}])|(\/[^\0\s()<>[\]{}/%]*)|(\()|<([^>]*)>|([^\0\s()<>[\]{}/%]+)|([^]))/y;
const ESCAPES = { n: "\n", r: "\r", t: "\t", b: "\b", f: "\f" }, PART = /[^()\\]+|\\(?:([0-7]{1,3})|(\r\n?|\n)|([^]))|[^]/y, IMAGE_END = /\sEI(?=\s|$)/g;

const char = String.fromCharCode;
const ofHex = (hex) => hex.replace(/\s/g, "").replace(/..?/g, (two) => char(parseInt(two.padEnd(2, "0"), 16)));
const numberOf = (bytes) => [...bytes].reduce((sum, one) => 256 * sum + one.charCodeAt(0), 0);
const utf16 = (bytes) => bytes.replace(/[^]{2}/g, (two) => char(numberOf(two)));

function binary(bytes) {
  const parts = [];
  for (let at = 0; at < bytes.length; at += 8192) parts.push(char.apply(null, bytes.subarray(at, at + 8192)));
  return parts.join("");
}

async function inflated(text, most) {
  const packed = new Blob([new Uint8Array(text.length).map((_, at) => text.charCodeAt(at))]), parts = [];
  const reader = packed.stream().pipeThrough(new DecompressionStream("deflate")).getReader();
  try {
    for (let size = 0, got; size <= most && !(got = await reader.read()).done; size += got.value.length) parts.push(binary(got.value));
  } catch { /* what came before an error stays */ }
  reader.cancel().catch(() => {});
  return parts.join("");
}

function ofLzw(text, most) {
  const parts = [], table = [];
  let last = "", size = 0, held = 0, bits = 0, width = 9;
  for (let i = 0; i < text.length && size <= most; i++) {
    held = (held << 8 | text.charCodeAt(i)) & 0xFFFFF;
    if ((bits += 8) < width) continue;
    const code = held >> (bits -= width) & (1 << width) - 1;
    const now = code === 256 ? "" : code < 256 ? char(code) : table[code - 258] ?? (last && last + last[0]);
    if (code === 257 || !(now || code === 256)) break;
    if (!now) table.length = 0; else if (last && table.length < 3838) table.push(last + now[0]);
    parts.push(last = now);
    size += now.length;
    width = Math.min(12, 32 - Math.clz32(table.length + 259));
  }
  return parts.join("");
}

const of85 = (text) => text.replace(/^\s*<~|[\0\s]/g, "").replace(/~[^]*/, "").replaceAll("z", "!!!!!").replace(/.{2,5}/g, (five) => {
  const value = [...five.padEnd(5, "u")].reduce((sum, one) => 85 * sum + one.charCodeAt(0) - 33, 0);
  return char(value >>> 24, value >>> 16 & 255, value >>> 8 & 255, value & 255).slice(0, five.length - 1);
});
const UNPACK = { "/FlateDecode": inflated, "/LZWDecode": ofLzw, "/ASCII85Decode": of85, "/ASCIIHexDecode": (text) => ofHex(text.split(">")[0]) };
/** The bytes that all streams of a file may unpack to, each counted as LEAST at least, and how deep forms may stand in forms. */
const MOST_UNPACKED = 64 << 20, LEAST = 4096, DEEPEST = 12;

/** Reads values: numbers, "/names", {bytes}, {ref}, lists, maps; and {op} of an operator. */
class Reader {
  constructor(text, at = 0) { Object.assign(this, { text, at }); }
  match(pattern) {
    pattern.lastIndex = this.at;
    const found = pattern.exec(this.text);
    if (found) this.at = pattern.lastIndex;
    return found ?? [];
  }

  next() {
    const [all, ref, mark, name, round, hex, word] = this.match(NEXT), list = [];
    if (all === undefined || name) return name;
    if (ref) return { ref };
    if (round || hex !== undefined) return { bytes: round ? this.round() : ofHex(hex) };
    if (mark === "[" || mark === "<<") {
      for (let one; (one = this.next()) !== undefined && one.op !== (mark === "[" ? "]" : ">>");) list.push(one);
      return mark === "[" ? list : new Map(list.flatMap((key, i) => (i % 2 ? [] : [[key, list[i + 1]]])));
    }
    const number = parseFloat(word);
    return isNaN(number) ? { op: word ?? mark ?? "" } : number;
  }

  round() {
    for (let made = "", depth = 1; ;) {
      const [all, octal, line, escaped] = this.match(PART);
      depth += (all === "(") - (all === ")");
      if (!depth || all === undefined) return made;
      made += octal ? char(parseInt(octal, 8) & 255) : line ? "" : escaped ? ESCAPES[escaped] ?? escaped : all;
    }
  }

  /** Calls with each operator and the values before it, in slices between which the page goes on. */
  async each(call) {
    const values = [];
    for (let one; (one = this.next()) !== undefined;) {
      if (one.op === undefined) { values.push(one); continue; }
      await call(one.op, values.splice(0));
      if (performance.now() - since > SLICE) since = await new Promise((go) => { setTimeout(() => go(performance.now())); });
    }
  }
}

/** Reads which texts codes stand for. @returns the bytes of a code */
async function readMap(text, texts) {
  let length = 2;
  await new Reader(text).each((op, values) => {
    if (op === "endcodespacerange") length = values[0].bytes.length || 2;
    const step = { endbfchar: 2, endbfrange: 3 }[op];
    for (let i = 0; i + step <= values.length; i += step) {
      const [first, last] = [values[i], values[i + step - 2]].map(({ bytes }) => numberOf(bytes)), to = values[i + step - 1];
      for (let code = first; code <= last && code - first < 65536; code++) {
        const made = utf16((to[code - first] ?? to).bytes), end = made.length - 1;
        texts.set(code, to.bytes ? made.slice(0, end) + char(made.charCodeAt(end) + code - first) : made);
      }
    }
  });
  return length;
}

class Pdf {
  places = new Map();
  fonts = new Map();
  unpacked = 0;
  hasPictures = false;
  async open(bytes) {
    this.file = binary(bytes);
    const found = [];
    for (const { 0: all, 1: number, index } of this.file.matchAll(/(\d+)\s+\d+\s+obj\b|\/ObjStm\b/g)) {
      if (number) found.push([number, index + all.length]); else found.at(-1)?.push(true);
    }
    for (const [ref, start, holds] of found) {  // later ones take the places of earlier ones
      this.places.set(ref, [this.file, start]);
      if (!holds) continue;
      const body = await this.data({ ref }), reader = new Reader(body), first = this.at({ ref }, "/First");
      while (reader.at < Math.min(first, body.length) - 2) this.places.set(`${reader.next()}`, [body, first + reader.next()]);
    }
  }

  /** What a reference stands for, if it is one. */
  get(value) {
    const place = this.places.get(value?.ref);
    if (!place) return value;
    if (place.length === 2) {
      const reader = new Reader(...place), made = place[2] = reader.next();
      if (made instanceof Map && reader.match(/\s*stream\r?\n?/y).length) made.begins = reader.at;
    }
    return place[2];
  }

  at(dict, key) { return this.get(this.get(dict)?.get?.(key)); }
  async data(one) {
    const stream = this.get(one), end = /\r?\n?endstream/g, filters = [this.at(stream, "/Filter") ?? []].flat();
    if (!stream?.begins || !filters.every((name) => name in UNPACK)) return "";
    end.lastIndex = stream.begins + (this.at(stream, "/Length") || 0);
    let text = this.file.slice(stream.begins, end.exec(this.file)?.index);
    for (const name of filters) text = await UNPACK[name](text, MOST_UNPACKED - this.unpacked);
    this.unpacked += Math.max(text.length, LEAST);
    return this.unpacked > MOST_UNPACKED ? "" : text;
  }

  pages() {
    const found = new Map(), seen = new Set(), root = [...this.file.matchAll(/\/Root\s+(\d+)/g)].at(-1)?.[1];
    const walk = (one, inherited) => {
      const page = this.get(one), resources = this.at(page, "/Resources") ?? inherited;
      if (!(page instanceof Map) || seen.has(page)) return;
      seen.add(page);
      if (page.has("/Kids")) this.at(page, "/Kids")?.forEach?.((kid) => walk(kid, resources)); else found.set(page, resources);
    };
    walk(this.at({ ref: root }, "/Pages"));
    if (!found.size) for (const ref of this.places.keys()) if (this.at({ ref }, "/Type") === "/Page") walk({ ref });
    return [...found];
  }

  async font(dict) {
    const isWide = this.at(dict, "/Subtype") === "/Type0", map = await this.data(this.at(dict, "/ToUnicode")), texts = new Map();
    if (!isWide) [...new TextDecoder("latin1").decode(Uint8Array.from({ length: 256 }, (_, i) => i))].forEach((one, i) => texts.set(i, i < 32 ? LIGATURES[(i % 16) - 11] ?? "" : one));  // where TeX has them
    const length = await readMap(map, texts).catch(() => 2);
    const inner = isWide ? this.at(dict, "/DescendantFonts")?.[0] : dict, list = this.at(inner, isWide ? "/W" : "/Widths") ?? [], widths = new Map();
    const put = (first, all) => all.forEach((width, i) => widths.set(first + i, width));
    if (!isWide) put(this.at(dict, "/FirstChar"), list);
    for (let i = 0; isWide && i < list.length; i += 2) {  // a code and widths, or two codes and the width of all between
      const first = list[i], next = this.get(list[i + 1]);
      put(first, Array.isArray(next) ? next : Array(Math.min(next - first + 1, 65536)).fill(list[i++ + 2]));
    }
    return { texts, widths, length: isWide ? length : 1, usual: isWide ? this.at(inner, "/DW") ?? 1000 : 500 };
  }

  /** The text that a page's operators show. It follows where texts are put, and leaves out how the whole page is turned (cm). */
  async textOf(page, resources) {
    const parts = [];
    for (const one of [this.at(page, "/Contents") ?? []].flat()) parts.push(await this.data(one));
    let reader, deep = 0, made = "", font = await this.font(), size = 1, scale = 1, leading = 0, moved = false, start = 0, x = 0, y = 0, end = 0, level = 0;
    const move = (right, up) => { x = start += scale * right; y += scale * up; moved = true; };
    const show = ({ bytes }) => {
      const high = Math.abs(size * scale), gap = x - end, isApart = !font.widths.size || gap > 0.15 * high || gap < -high;
      if (Math.abs(y - level) > high / 2) made += "\n"; else if (moved && isApart && !/\s/.test(made.slice(-1))) made += " ";
      for (let i = 0; i < bytes.length; i += font.length) {
        const code = numberOf(bytes.slice(i, i + font.length));
        made += font.texts.get(code) ?? UNKNOWN;
        x += (font.widths.get(code) ?? font.usual) / 1000 * size * scale;
      }
      [moved, level, end] = [false, y, x];
    };
    const down = (string) => { move(0, -leading); if (string) show(string); };
    const ops = {
      Tm: (a, b, c, d, e, f) => { [scale, start, y] = [Math.abs(d), e, f]; move(0, 0); }, BT: () => ops.Tm(1, 0, 0, 1, 0, 0),
      Td: move, TD: (right, up) => { leading = -up; move(right, up); }, TL: (high) => { leading = high; }, "T*": () => down(),
      Tj: show, "'": down, '"': (word, letter, string) => down(string),
      TJ: (list) => list.forEach((one) => { if (one.bytes === undefined) { x -= one / 1000 * size * scale; moved ||= one < WIDE; } else show(one); }),
      Tf: async (name, high) => {
        const dict = this.at(this.at(resources, "/Font"), name);
        this.fonts.set(dict, font = this.fonts.get(dict) ?? await this.font(dict));
        size = high;
      },
      ID: () => { this.hasPictures = true; reader.match(IMAGE_END); },
      Do: async (name) => {
        const one = this.at(this.at(resources, "/XObject"), name), kind = this.at(one, "/Subtype");
        this.hasPictures ||= kind === "/Image";
        if (kind !== "/Form" || deep > DEEPEST) return;
        const before = [reader, resources, font, size, leading];
        made += "\n";
        resources = this.at(one, "/Resources") ?? resources;
        await run(await this.data(one));
        made += "\n";
        [reader, resources, font, size, leading] = before;
      },
    };
    const run = async (text) => {
      reader = new Reader(text);
      deep += 1;
      await reader.each((op, values) => ops[op]?.(...values)).catch(() => {});  // what came before an error stays
      deep -= 1;
    };
    await run(parts.join("\n"));
    return made.replace(/\xad/g, "-").replace(/\n{2,}/g, "\n").trim();
  }
}

/** The text of a PDF, and which part of its pages it is once it has `most` characters. Errors end a sentence that its name begins. */
export async function textOfPdf(bytes, most) {
  const pdf = new Pdf(), texts = [], pages = await pdf.open(bytes).then(() => pdf.pages()).catch(() => []);
  if (/\/Encrypt\s*(\d+\s+\d+\s+R|<<)/.test(pdf.file)) throw new Error("is encrypted: save it without a password.");
  if (!pages.length && pdf.unpacked <= MOST_UNPACKED) throw new Error("is broken: no pages are found in it.");
  for (let size = 0; texts.length < pages.length && size < most; size += texts.at(-1).length) texts.push(await pdf.textOf(...pages[texts.length]));
  if (pdf.unpacked > MOST_UNPACKED) throw new Error(`unpacks to more than ${MOST_UNPACKED >> 20} MiB, which this page does not read: attach its text.`);
  const text = texts.filter(Boolean).join("\n\n");
  if (!text) throw new Error(pdf.hasPictures ? "holds pictures of pages, no text." : "holds no text that this page can read.");
  if (2 * text.split(UNKNOWN).length > text.replace(/\s/g, "").length + 2) throw new Error("has fonts that do not say which letters they show.");
  return { text, share: texts.length / pages.length };
}
