// Pictures of a message: chosen, dropped or pasted, shown above the input until they are sent in data URLs.

import { byId, element, iconButton } from "../dom.js";

let taken = null;  // what the server says of the media that the model takes; null where it takes no pictures
let waiting = [];  // the pictures of the next message: their names, addresses, and lengths as base64
let reading = Promise.resolve();

// `inConversation` returns the pictures of the conversation so far, which are sent again with each message.
export function beginPictures(inConversation) {
  const files = byId("files"), chat = byId("chat");
  const add = (list) => {
    const chosen = [...list];  // now: the list is emptied when its event is over
    reading = reading.then(() => take(chosen, inConversation));
  };
  byId("add-pictures").addEventListener("click", () => files.click());
  files.addEventListener("change", () => { add(files.files); files.value = ""; });
  const brings = (event) => taken && event.dataTransfer.types.includes("Files");
  const hovers = (is) => chat.classList.toggle("drops", is);
  chat.addEventListener("dragover", (event) => { if (brings(event)) { event.preventDefault(); hovers(true); } });
  chat.addEventListener("dragleave", (event) => { if (!chat.contains(event.relatedTarget)) hovers(false); });
  chat.addEventListener("drop", (event) => { hovers(false); if (brings(event)) { event.preventDefault(); add(event.dataTransfer.files); } });
  byId("input").addEventListener("paste", ({ clipboardData }) => {
    const text = clipboardData.types.includes("text/plain") && clipboardData.types.includes("text/html");
    if (taken && !text) add(clipboardData.files);  // office programs put a picture of the text beside it
  });
}

// Offers to add pictures if the model takes them. `media` is that of its card in /v1/models.
export function allowPictures(media) {
  taken = media?.most.image ? media : null;
  byId("add-pictures").hidden = !taken;
}

// Ends when everything that was chosen so far is read, and waits.
export const allRead = () => reading;
export const areWaiting = () => waiting.length > 0;

// The pictures of the message that is sent now; none waits after that.
export function takeWaiting() {
  const sent = waiting;
  waiting = [];
  show();
  return sent;
}

// The content of a message: its pictures come before its text.
export function contentOf(text, pictures) {
  if (!pictures.length) return text;
  const parts = pictures.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return text.trim() ? [...parts, { type: "text", text }] : parts;
}

export const shown = (pictures) => pictures.map(({ name, url }) => element("img", { src: url, alt: name, title: name, draggable: "false" }));

// Why a file cannot be sent beside other pictures; "" if it can be.
export function refusal({ name, type, size }, others, { most, max_bytes }, types) {
  if (!types.includes(type)) return `${name} is none of the pictures that can be read: ${types.join(", ")}.`;
  if (others.length >= most.image) return `${name} is one too many: a conversation may have ${most.image} pictures.`;
  const bytes = others.reduce((sum, other) => sum + other.bytes, asBase64(size));
  const limit = Math.floor(max_bytes / 2 ** 20);
  return bytes > max_bytes ? `${name} is too large: pictures of a conversation may have ${limit} MiB together, as base64.` : "";
}

const asBase64 = (size) => 4 * Math.ceil(size / 3);

async function take(files, inConversation) {
  const types = byId("files").accept.split(","), refused = [];
  for (const file of files) {
    const why = refusal(file, [...inConversation(), ...waiting], taken, types);
    if (why) refused.push(why);
    else {
      try { waiting.push({ name: file.name, bytes: asBase64(file.size), url: await dataUrl(file) }); } catch { refused.push(`${file.name} cannot be read.`); }
    }
  }
  if (files.length) byId("told").textContent = refused.join(" ");
  show();
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
  const remove = (picture) => { waiting = waiting.filter((one) => one !== picture); show(); byId("input").focus(); };
  byId("pictures").replaceChildren(...waiting.map((picture) => element("li", {}, ...shown([picture]),
    iconButton("close", `Remove ${picture.name}`, () => remove(picture), { class: "icon small" }))));
  byId("input").dispatchEvent(new Event("input"));
}
