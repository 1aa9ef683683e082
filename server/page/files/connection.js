// Whether the server answers: a line below the header says when it is gone, and when it is back.

import { byId, element } from "./dom.js";

const AGAIN = 1000, LOOK = 10_000, TOLD = 5000;
const WORDS = {
  restarting: "The engine has failed and is being started again.",
  stalled: "The engine makes no progress. Requests wait for it.",
  draining: "The server is being stopped: it finishes what it has begun.",
};
let waiting = null;
let hiding = 0;
let onBack = () => {};

/** Shows a line about the server, with a button if there is something to be done; "" hides it. */
export function showState(text, kind = "", label = "", act = () => {}) {
  const place = byId("state");
  clearTimeout(hiding);
  place.className = kind;
  place.replaceChildren(text);
  if (label) place.append(" ", element("button", { type: "button", class: "chip", text: label, onclick: act }));
  place.hidden = !text;
}

/** Ends when the server takes requests, and says meanwhile how far that is, or that it does not answer. */
export function untilReady() {
  waiting ??= wait().finally(() => { waiting = null; });
  return waiting;
}

async function wait() {
  for (let gone = false; ; await new Promise((resolve) => setTimeout(resolve, AGAIN))) {
    const now = await health();
    if (now === null) {
      if (!gone) showState("The server does not answer: it was stopped, or the network is down. This page looks for it each second, and keeps what you wrote.", "gone");
      gone = true;
    } else if (now.state === "ready" || now.state === "asleep") {
      showState(gone ? "The server is back." : "", "back");
      if (!gone) return;
      hiding = setTimeout(() => showState(""), TOLD);
      return onBack();
    } else {
      const progress = `The model is loading: ${now.stage}, ${Math.round(100 * now.progress)} %`;
      showState(now.state === "loading" ? progress : WORDS[now.state] ?? `The server cannot answer: ${now.reason || now.state || "it is not ready"}. Its log says more.`);
    }
  }
}

/** What /health says; null if nobody answers, or only a proxy before the server. One that hides this path is no reason to worry. */
async function health() {
  try {
    const response = await fetch("health", { cache: "no-store" }), found = await response.json().catch(() => ({}));
    return found.state ? found : response.status < 500 ? { state: "ready" } : null;
  } catch {
    return null;
  }
}

/** Looks at the server now and then while the page is seen. @param {() => void} back  called when the server is there again */
export function watchServer(back) {
  onBack = back;
  const look = async () => {
    if (document.hidden || waiting) return;
    const now = await health();
    if (now?.state !== "ready" && now?.state !== "asleep") untilReady();
  };
  setInterval(look, LOOK);
  for (const [place, name] of [[document, "visibilitychange"], [window, "online"], [window, "offline"]]) place.addEventListener(name, look);
}
