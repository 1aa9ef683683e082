// Files of a message, pictures and texts: chosen, dropped or pasted, shown above the input until they are sent.

import { post } from "../api.js";
import { byId, element, iconButton, number } from "../dom.js";
import { chosen, needed, otherWith } from "../models.js";

const PICTURES = ["image/jpeg", "image/png", "image/webp", "image/gif", "image/bmp", "image/tiff", "image/avif"];
/** The part of the context that files may fill, beyond which each takes half of what is left; the most bytes of a text and of a PDF that are looked at. */
const FILLED = 0.75, MOST_BYTES = 2_000_000, MOST_PDF = 32 << 20;  // the server takes 4 MiB of JSON, in which a line's end has two bytes

/**
 * @typedef {{name: string, url: string, bytes: number}} Picture  its address, and its length as base64
 * @typedef {{name: string, text: string, tokens: number, share: number}} Text  what is sent of a text; `share` is its part of the file
 */
/** @type {(Picture | Text)[]} The files of the next message. */
let waiting = [];
let reading = Promise.resolve();

/** @param {() => {pictures: Picture[], used: number}} soFar  the pictures of the conversation, which are sent again with each message, and its tokens */
export function beginFiles(soFar) {
  const files = byId("files"), chat = byId("chat");
  const add = (list) => {
    const chosen = [...list];  // now: the list is emptied when its event is over
    reading = reading.then(() => take(chosen, soFar));
  };
  byId("add-files").addEventListener("click", () => files.click());
  files.addEventListener("change", () => { add(files.files); files.value = ""; });
  const brings = (event) => event.dataTransfer.types.includes("Files");
  const hovers = (is) => chat.classList.toggle("drops", is);
  chat.addEventListener("dragover", (event) => { if (brings(event)) { event.preventDefault(); hovers(true); } });
  chat.addEventListener("dragleave", (event) => { if (!chat.contains(event.relatedTarget)) hovers(false); });
  for (const name of ["dragover", "drop"]) {  // a browser opens what is dropped elsewhere in place of the page
    addEventListener(name, (event) => { if (brings(event) && !event.target.matches("input")) event.preventDefault(); });
  }
  chat.addEventListener("drop", (event) => { hovers(false); if (brings(event)) { event.preventDefault(); add(event.dataTransfer.files); } });
  byId("input").addEventListener("paste", ({ clipboardData }) => {
    if (!(clipboardData.types.includes("text/plain") && clipboardData.types.includes("text/html"))) add(clipboardData.files);  // office programs put a picture of the text beside it
  });
}

/** Says by the button which files the chosen model takes. */
export function offerFiles(card) {
  const label = card.media?.most.image ? "Add pictures, text files or PDFs" : "Add text files or PDFs";
  byId("add-files").setAttribute("aria-label", label);
  byId("add-files").title = `${label}, or drop or paste them`;
  byId("add-files").querySelector("use").setAttribute("href", card.media?.most.image ? "#i-picture" : "#i-file");
}

/** Ends when everything that was chosen so far is read, and waits. */
export const allRead = () => reading;
export const areWaiting = () => waiting.length > 0;

/** The files of the message that is sent now, as fields of it; none waits after that. */
export function takeWaiting() {
  const pictures = waiting.filter(({ url }) => url), texts = waiting.filter(({ url }) => !url);
  waiting = [];
  show();
  return { ...(pictures.length && { pictures }), ...(texts.length && { texts }) };
}

/** The content of a message: pictures come before the text, in which files come before what was written. */
export function contentOf(written, pictures = [], texts = []) {
  const text = [...texts.map(fenced), written].filter((part) => part.trim()).join("\n\n");
  if (!pictures.length) return text || written;
  const parts = pictures.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

function fenced(file) {
  const fence = "`".repeat(Math.max(3, ...[...file.text.matchAll(/`{3,}/g)].map(([run]) => run.length + 1)));
  return `${titleOf(file)}:\n${fence}\n${file.text}\n${fence}`;
}

const titleOf = ({ name, share }) => (share < 1 ? `${name} (the first ${Math.max(1, Math.floor(100 * share))} %)` : name);

export const shown = (pictures) => pictures.map(({ name, url }) => element("img", { src: url, alt: name, title: name, draggable: "false" }));
export const shownTexts = (texts) => texts.map((one) => element("details", {}, element("summary", { text: titleOf(one) }), element("pre", { text: one.text })));

/** Why a picture cannot be sent beside others; "" if it can be. `media`: what the model's card says of them. */
export function refusal({ name, type, size }, others, media) {
  if (!media?.most.image) return `${name} is a picture, and ${chosen().id} reads text only.${otherWith((card) => card.media?.most.image, "reads pictures")}`;
  if (!PICTURES.includes(type)) return `${name} is none of the pictures that can be read: ${PICTURES.join(", ")}.`;
  if (others.length >= media.most.image) return `${name} is one too many: a conversation may have ${media.most.image} pictures.`;
  const bytes = others.reduce((sum, other) => sum + other.bytes, asBase64(size));
  const limit = Math.floor(media.max_bytes / 2 ** 20);
  return bytes > media.max_bytes ? `${name} is too large: pictures of a conversation may have ${limit} MiB together, as base64.` : "";
}

const asBase64 = (size) => 4 * Math.ceil(size / 3);
const isPicture = ({ type }) => type.startsWith("image/") && !type.includes("svg");

async function take(files, soFar) {
  const told = [];
  for (const file of files) {
    try { waiting.push(await (isPicture(file) ? asPicture(file, soFar()) : asText(file, soFar(), told))); } catch (error) { told.push(error.message); }
  }
  if (files.length) byId("told").textContent = told.join(" ");
  show();
}

async function asPicture(file, { pictures }) {
  const why = refusal(file, [...pictures, ...waiting.filter(({ url }) => url)], needed().media);
  if (why) throw new Error(why);
  const url = await dataUrl(file).catch(() => { throw new Error(`${file.name} cannot be read.`); });
  return { name: file.name, bytes: asBase64(file.size), url };
}

/** As much of a text file as the context has room for, in tokens as the server counts them. */
async function asText(file, { used }, told) {
  const { name, size, type } = file, bytesOf = (text) => new TextEncoder().encode(text).length, model = needed().id;
  const isPdf = type === "application/pdf" || /\.pdf$/i.test(name);
  const { text: whole, share: part } = isPdf ? await ofPdf(file) : { text: textOf(await file.slice(0, MOST_BYTES).arrayBuffer()), share: Math.min(1, MOST_BYTES / size) };
  if (!whole?.trim()) throw new Error(whole === null ? `${name} is neither a picture nor a text in UTF-8.` : `${name} is empty.`);
  const { tokens, max_model_len: most } = await post("tokenize", { model, prompt: whole, add_special_tokens: false });
  const taken = waiting.reduce((sum, one) => sum + (one.tokens ?? 0), used);
  const room = Math.floor(Math.max(FILLED * most - taken, (most - taken) / 2));
  if (room < 1) throw new Error(`${name} has no room: the conversation fills the context of ${number(most)} tokens.`);
  const cut = tokens.length > room;
  const text = cut ? (await post("detokenize", { model, tokens: tokens.slice(0, room) })).prompt : whole;
  const made = { name, text, tokens: Math.min(room, tokens.length), share: cut ? part * bytesOf(text) / bytesOf(whole) : part };
  if (made.share < 1) told.push(`${name} is too long for the context: only ${titleOf({ ...made, name: "" }).slice(2, -1)} of it are sent, ${number(made.tokens)} tokens.`);
  return made;
}

async function ofPdf(file) {
  if (file.size > MOST_PDF) throw new Error(`${file.name} is too large: a PDF may have ${MOST_PDF >> 20} MiB.`);
  const { textOfPdf } = await import("./pdf.js");
  return textOfPdf(new Uint8Array(await file.arrayBuffer()), MOST_BYTES * 2 / 3).catch(({ message }) => { throw new Error(`${file.name} ${message}`); });
}

/** null if bytes are no text. A character that the last bytes begin is left out. */
function textOf(bytes) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes, { stream: true });
    return text.includes("\0") ? null : text;
  } catch {
    return null;
  }
}

function dataUrl(file) {
  const reader = new FileReader();
  return new Promise((resolve, reject) => {
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}

function show() {
  const remove = (file) => { waiting = waiting.filter((one) => one !== file); show(); byId("input").focus(); };
  byId("attached").replaceChildren(...waiting.map((file) => element("li", {}, ...(file.url ? shown([file]) : [element("span", { class: "chip", text: titleOf(file) })]),
    iconButton("close", `Remove ${file.name}`, () => remove(file), { class: "icon small" }))));
  byId("input").dispatchEvent(new Event("input"));
}
