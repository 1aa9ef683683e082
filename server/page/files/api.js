// Requests to this server, by relative addresses, so that a proxy may show it under any path.

import { untilReady } from "./connection.js";
import { byId } from "./dom.js";

const KEY = "facet-key";
let asking = null;
let turns = 0;  // how often somebody was asked for the key
let declined = false;  // whether they had none: only what they do themselves asks for it again then

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export const address = () => new URL(".", document.baseURI).href.replace(/\/$/, "");

function headers(body) {
  const key = keyNow(), form = body instanceof FormData;  // whose content type the browser writes
  return { ...(form ? { "X-Model": body.get("model") } : { "Content-Type": "application/json" }), ...(key ? { Authorization: `Bearer ${asBytes(key)}` } : {}) };
}

/** A text in UTF-8, a character for each byte: browsers refuse all others in headers. */
const asBytes = (text) => String.fromCharCode(...new TextEncoder().encode(text));

const keyNow = () => sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY);

export const askAgain = () => { declined = false; };

/** Asks for the key, once for all requests that wait for it. @param {?string} wrong  the key that the server did not take */
function askForKey(wrong) {
  asking ??= new Promise((resolve) => {
    const dialog = byId("key-dialog"), field = byId("key"), stays = byId("key-stays");
    byId("key-reason").textContent = wrong ? "The server does not know this key. Is a letter missing, or was it replaced by another?"
      : "Whoever runs the server has it: it is what they gave as --api-key, or a line of their file of keys.";
    stays.checked = localStorage.getItem(KEY) !== null;
    for (const place of [sessionStorage, localStorage]) place.removeItem(KEY);
    dialog.addEventListener("close", () => {
      declined = !field.value;
      if (field.value) (stays.checked ? localStorage : sessionStorage).setItem(KEY, field.value);
      field.value = "";
      asking = null;
      turns += 1;
      resolve();
    }, { once: true });
    byId("no-key").onclick = () => { field.value = ""; dialog.close(); };
    dialog.addEventListener("cancel", () => { field.value = ""; }, { once: true });
    dialog.showModal();
  });
  return asking;
}

/** A browser says of all that goes wrong on the way that it "failed to fetch", in words of its own. */
async function reach(path, options) {
  try { return await fetch(path, options); } catch (error) {
    if (error.name === "AbortError") throw error;
    untilReady();
    throw new ApiError("The server does not answer.", 0);
  }
}

async function next(reader) {
  try { return await reader.read(); } catch (error) {
    if (error.name === "AbortError") throw error;
    untilReady();
    return { done: true };
  }
}

export async function send(path, body, signal, more = {}) {
  for (;;) {
    const options = body === undefined ? {} : { method: "POST", body: body instanceof FormData ? body : JSON.stringify(body) };
    const had = keyNow(), turn = turns, response = await reach(path, { ...options, headers: { ...headers(body), ...more }, signal, cache: "no-store" });
    if (response.ok) return response;
    const text = await response.text();
    let reason = text;
    try { reason = JSON.parse(text).error.message ?? text; } catch { /* it is no error of ours, shown as it is */ }
    if (response.status !== 401) throw new ApiError(reason || `status ${response.status}`, response.status);
    if (turn === turns && !(declined && body === undefined)) await askForKey(had);  // or somebody has answered while this request was on its way
    if (keyNow() === had) throw new ApiError("This server answers only with a key.", response.status);
  }
}

export const get = async (path, more) => (await send(path, undefined, undefined, more)).json();
export const post = async (path, body) => (await send(path, body)).json();

// The data of each event of a stream, until it ends or `signal` aborts it. `hear` is called with its comments.
export async function* events(path, body, signal, hear = () => {}) {
  const reader = (await send(path, body, signal)).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await next(reader);
      if (done) throw new ApiError("The answer broke off before it was complete.");
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        if (block.startsWith(": ")) hear(block.slice(2));
        if (!block.startsWith("data: ")) continue;
        const data = block.slice(6);
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new ApiError(event.error.message);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
