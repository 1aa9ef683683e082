// The first screen of a chat: what the model can do, and three messages to begin with.

import { byId, element, icon } from "../dom.js";
import { facts } from "../models.js";

const EXAMPLES = [
  ["Explain", "Why is the sky blue? Explain it in three sentences."],
  ["Write code", "Write a Python function that merges overlapping intervals, with a short test."],
  ["Do maths", "Derive the quadratic formula, step by step."],
];
/** What the built-in demo model has learned. */
const OF_DEMO = [
  ["Ask for a fact", "What is the capital of France?"],
  ["Calculate", "What is 17 plus 25?"],
  ["Hear a story", "Tell me a story."],
];

/** @param {(text: string) => void} say  sends a message */
export function drawFirst(card, say) {
  const examples = (card.root === "demo" ? OF_DEMO : EXAMPLES).map(([title, text]) => [title, text, () => say(text)]);
  if (card.media?.most.image) examples[2] = ["Show a picture", "What is on this picture?", () => { byId("input").value = "What is on this picture?"; byId("files").click(); }];
  byId("first").replaceChildren(
    icon("logo"),
    element("h2", { text: "What can I do for you?" }),
    element("p", { class: "help" }, ...facts(card)),
    element("ul", { class: "examples", "aria-label": "Examples" }, ...examples.map(([title, text, act]) =>
      element("li", {}, element("button", { type: "button", onclick: act }, element("b", { text: title }), element("span", { text }))))),
  );
}
