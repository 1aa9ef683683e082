// Views of models that read: asking about a text, comparing texts, ranking documents, classifying, hearing. Each has a form, and examples that fill and run it.

import { post } from "../api.js";
import { announce, byId, element } from "../dom.js";
import { abilities, chosen, facts, infoOf, model, otherWith, wasUsed } from "../models.js";
import { bar, probabilityBars, titled } from "./bars.js";
import { addButton, decide, fillQuestions, questionList } from "./decide.js";
import { recordButton, transcribe } from "./hear.js";
import { drawMap } from "./map.js";
import { cosine } from "./vector_math.js";

/** @typedef {{id: string, label: string, rows: number, line?: boolean, file?: boolean, questions?: boolean}} Field  `line`: the field has one line, not many texts */

const TASKS = {
  decide: {
    title: "Ask about a text", button: "Ask", work: decide, more: addButton,
    words: "The model reads the text once, and gives each answer to each question a probability. It writes nothing.",
    fields: [{ id: "about", label: "Text", rows: 4 }, { id: "questions", questions: true }],
    examples: [
      ["A complaint", "I was charged twice for my March invoice. Please refund me today.", [["predicate", "The customer asks for money back."],
        ["choice", "Which team should answer?", "billing\ntechnical\nsales"], ["score", "How angry is the customer?", "calm\nannoyed\nfurious"]]],
      ["News", "The central bank raised its interest rate by a quarter point on Thursday, more than most had expected.", [["choice", "What is it about?", "economy\nsport\nscience\nweather"],
        ["predicate", "Borrowing becomes more expensive."], ["score", "How surprising was it?", "expected\na little surprising\nvery surprising"]]],
      ["A review", "The food was cold and the waiter was rude, but the view was wonderful.", [["score", "How satisfied was the guest?", "not at all\npartly\nfully"],
        ["choice", "What did the guest like?", "food\nservice\nview"], ["predicate", "The guest will come again."]]],
    ],
  },
  compare: {
    title: "How alike are texts?", button: "Compare", work: compare,
    words: "The model turns each text into a vector. The nearer the cosine of two vectors is to 1, the more alike are the texts.",
    fields: [{ id: "texts", label: "Texts, one in each line", rows: 4 }],
    examples: [
      ["Dogs and markets", "A dog runs in the park.\nA puppy plays outside.\nThe stock market fell today.\nShares lost value."],
      ["Two languages", "Good morning.\nGuten Morgen.\nI am hungry.\nIch habe Hunger."],
      ["Support questions", "How do I reset my password?\nI cannot log in any more.\nWhere is my parcel?\nWhen will my order arrive?"],
    ],
  },
  rank: {
    title: "Which documents answer a query?", button: "Rank", work: rank,
    words: "The model scores each document by how well it answers the query, and the best comes first.",
    fields: [{ id: "query", label: "Query", rows: 1, line: true }, { id: "documents", label: "Documents, one in each line", rows: 4 }],
    examples: [
      ["Animals at play", "animals at play", "The stock market fell today.\nA puppy plays outside.\nCats like to sleep in the sun."],
      ["A capital", "What is the capital of France?", "Paris is the capital of France.\nBerlin is a city in Germany.\nFrance is known for its cheese."],
      ["An error message", "The disk is full", "Delete old logs with journalctl --vacuum-time=7d.\nRestart the router when the network is slow.\nno space left on device: df shows which volume is used up."],
    ],
  },
  classify: {
    title: "What class is a text?", button: "Classify", work: classify,
    words: "The model gives each of its classes a probability.",
    fields: [{ id: "classified", label: "Texts, one in each line", rows: 4 }],
    examples: [
      ["Praise and complaint", "What a wonderful day, everything worked.\nThe food was cold and the waiter was rude.\nIt was neither good nor bad."],
      ["News", "The team won the final after extra time.\nThe central bank raises interest rates.\nA new telescope looks at distant galaxies."],
      ["Messages", "You have won a prize, click here now!\nCan we move our meeting to Friday?\nThank you, you are the best!"],
    ],
  },
  hear: {
    title: "What is said?", button: "Transcribe", work: transcribe, more: recordButton,
    words: "The model writes what is said in a recording, or in the sound of a video.",
    fields: [{ id: "recording", label: "Recording", file: true }],
    examples: [],
  },
};

let last = "";

/** Shows a task's form; what was typed into it stays while the page is open. @param {keyof TASKS} name */
export function showTask(name) {
  const place = byId("task"), card = chosen();
  place.setAttribute("aria-label", TASKS[name].title);
  if (last === name + card.id) return;
  last = name + card.id;
  place.replaceChildren(element("div", { class: "inside" }, ...view(TASKS[name], card)));
}

function view(task, card) {
  const output = element("div", { id: "output", "aria-live": "polite" }), button = element("button", { type: "submit", text: task.button });
  const inputs = task.fields.map(inputOf);
  const fill = (values) => inputs.forEach((input, i) => { if (task.fields[i].questions) fillQuestions(input, values[i]); else input.value = values[i]; });
  const form = element("form", { id: "ask", onsubmit: (event) => { event.preventDefault(); run(task, button, output); } },
    ...task.fields.flatMap(({ id, label }, i) => [...(label ? [element("label", { for: id, text: label })] : []), inputs[i]]), element("div", { class: "row" }, button, ...(task.more?.() ?? [])));
  const examples = element("ul", { class: "chips", "aria-label": "Examples" }, ...task.examples.map(([title, ...values]) =>
    element("li", {}, element("button", { type: "button", class: "chip", text: title, onclick: () => { fill(values); form.requestSubmit(); } }))));
  if (task.examples.length) fill(task.examples[0].slice(1));
  return [element("h2", { text: task.title }), element("p", { class: "help", text: task.words }),
    element("p", { class: "help" }, ...facts(card)), ...untrained(task, card), ...(task.examples.length ? [examples] : []), form, output];
}

/** @param {Field} field */
function inputOf({ id, rows, line, file, questions }) {
  if (questions) return questionList(id);
  if (file) return element("input", { id, type: "file", accept: "audio/*,video/*", required: true });
  return line ? element("input", { id, required: true, autocomplete: "off" }) : element("textarea", { id, rows, required: true });
}

/** A model that writes gives vectors of its last states, which nobody has trained to say how alike texts are. */
function untrained(task, card) {
  if (!card.tasks.includes("generate") || !(task === TASKS.compare || task === TASKS.rank)) return [];
  const made = (other) => !other.tasks.includes("generate") && abilities(other).has(task === TASKS.rank ? "rank" : "compare");
  const way = otherWith(made, "was trained for it") || " Serve one that was: facet serve minilm, a small one from the extra of that name, or any embedding model or reranker of a hub.";
  return [element("p", { class: "notice", role: "note", text: `${card.id} was trained to write, and not to ${task === TASKS.rank ? "rank documents" : "compare texts"}: its results say little.${way}` })];
}

async function run(task, button, output) {
  button.disabled = true;
  output.setAttribute("aria-busy", "true");
  const started = performance.now();
  try {
    const shown = await task.work(output);
    const took = `Answered in ${Math.round(performance.now() - started)} ms.`;
    output.replaceChildren(...shown, element("p", { class: "help", text: took }));
    announce(took);
    wasUsed();
  } catch (error) {
    output.replaceChildren(element("p", { class: "error", role: "alert", text: error.message }));
  } finally {
    button.disabled = false;
    output.removeAttribute("aria-busy");
  }
}

const lines = (id) => byId(id).value.split("\n").map((line) => line.trim()).filter(Boolean);

async function compare() {
  const texts = lines("texts");
  const { data } = await post("v1/embeddings", { model: model(), input: texts });
  const vectors = data.sort((a, b) => a.index - b.index).map((one) => one.embedding);
  const cosines = vectors.map((a) => vectors.map((b) => cosine(a, b))), least = Math.min(...cosines.flat());
  const head = element("tr", {}, element("td"), ...texts.map((text, i) => element("th", { scope: "col", text: i + 1, title: text })));
  const rows = cosines.map((row, i) => element("tr", {}, element("th", { scope: "row", title: texts[i] }, element("span", { class: "place", text: i + 1 }), texts[i]), ...row.map((value) => cell(value, least))));
  const heat = titled("Cosines", element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Cosines" }, element("table", { class: "heat" }, element("thead", {}, head), element("tbody", {}, ...rows))));
  return vectors.length > 2 ? [heat, titled("Map of the two directions in which they differ most", drawMap(vectors, texts))] : [heat];
}

/** Colours say how a cosine stands between the least and 1. */
function cell(value, least) {
  const made = element("td", { class: "number", text: value.toFixed(3) });
  made.style.background = `color-mix(in oklab, var(--mark) ${(48 * (value - least)) / Math.max(1e-6, 1 - least)}%, transparent)`;
  return made;
}

async function rank() {
  const documents = lines("documents");
  const { results } = await post("v1/rerank", { model: model(), query: byId("query").value, documents });
  const scores = results.map((one) => one.relevance_score), least = Math.min(0, ...scores), most = Math.max(...scores);
  return [element("ol", { class: "bars" }, ...results.map((one, i) =>
    bar(`${i + 1}. ${documents[one.index]}`, one.relevance_score.toFixed(4), (one.relevance_score - least) / Math.max(1e-9, most - least))))];
}

async function classify() {
  const texts = lines("classified"), names = infoOf(chosen()).model_type?.classifier?.id2label ?? {};
  const { data } = await post("classify", { model: model(), input: texts });
  return data.sort((a, b) => a.index - b.index).map(({ index, probs }) => {
    const best = probs.map((share, i) => [names[i] ?? `Class ${i}`, share]).sort((a, b) => b[1] - a[1]).slice(0, 5);
    return titled(texts[index], probabilityBars(best));
  });
}
