// Tokens coloured by their probability, with their alternatives in a box beside the one that is pointed at.

import { byId, element } from "../dom.js";

const percent = (logprob, digits) => (100 * Math.exp(logprob)).toFixed(digits);

function shade(logprob) {
  const p = Math.exp(logprob);
  return p > 0.9 ? 4 : p > 0.6 ? 3 : p > 0.3 ? 2 : p > 0.1 ? 1 : 0;
}

/** Appends those of an answer's tokens that are not drawn yet. */
export function drawTokens(place, tokens) {
  for (const one of tokens.slice(place.childNodes.length)) place.append(typeof one === "string" ? one : token(one, !place.querySelector(".token")));
}

/** `first`: the Tab key leads to it, and the arrow keys to the others of its answer. */
function token([text, logprob, alternatives], first) {
  return element("span", {
    class: `token p${shade(logprob)}`, role: "group", tabindex: first ? 0 : -1, text,
    "aria-label": `${JSON.stringify(text)}, ${percent(logprob, 0)} %`, "aria-describedby": "tip",
    "data-tip": alternatives.map(([other, of]) => `${percent(of, 1).padStart(5)} %  ${JSON.stringify(other)}`).join("\n"),
  });
}

/** Shows alternatives by the mouse and by the arrow keys. */
export function beginTips(list) {
  const tip = byId("tip");
  const show = (event) => {
    const target = event.target.closest?.("[data-tip]");
    tip.hidden = !target;
    if (!target) return;
    const box = target.getBoundingClientRect();
    tip.textContent = target.dataset.tip;
    tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${box.bottom + tip.offsetHeight + 8 < innerHeight ? box.bottom + 4 : box.top - tip.offsetHeight - 4}px`;
  };
  for (const name of ["mouseover", "focusin"]) list.addEventListener(name, show);
  for (const name of ["mouseleave", "focusout"]) list.addEventListener(name, () => { tip.hidden = true; });
  list.addEventListener("keydown", (event) => {
    const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
    if (event.key === "Escape") tip.hidden = true;
    const next = step && event.target.classList.contains("token") && event.target[step];
    if (next) { event.preventDefault(); next.focus(); }
  });
}
