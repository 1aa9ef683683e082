// Vectors: which texts are alike, as a table and as a map; ranks of documents; classes of texts.

import { byId, element, model, post } from "./api.js";
import { cosine, labelPlaces, pca } from "./math.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 440, HEIGHT = 280;
const lines = (id) => byId(id).value.split("\n").map((line) => line.trim()).filter(Boolean);
const short = (text) => (text.length > 40 ? `${text.slice(0, 39)}…` : text);

export function beginVectors() {
  on("embed", "heat", compare);
  on("rerank", "ranked", rank);
  on("classify", "classes", classify);
}

function on(form, output, work) {
  byId(form).addEventListener("submit", async (event) => {
    event.preventDefault();
    const button = event.target.querySelector("[type=submit]");
    button.disabled = true;
    try {
      await work(byId(output));
    } catch (error) {
      byId(output).replaceChildren(element("p", { class: "error", role: "alert", text: error.message }));
    } finally {
      button.disabled = false;
    }
  });
}

async function compare(output) {
  const texts = lines("texts");
  byId("map").replaceChildren();
  const { data } = await post("v1/embeddings", { model: model(), input: texts });
  const vectors = data.sort((a, b) => a.index - b.index).map((one) => one.embedding);
  const head = element("tr", {}, element("td"), ...texts.map((text) => element("th", { scope: "col", text: short(text), title: text })));
  const rows = vectors.map((a, i) => element("tr", {}, element("th", { scope: "row", text: short(texts[i]), title: texts[i] }), ...vectors.map((b) => cell(cosine(a, b)))));
  output.replaceChildren(element("table", {}, element("caption", { text: "Cosine of the angle between vectors: 1 is the same direction" }), head, ...rows));
  if (vectors.length > 2) byId("map").replaceChildren(map(pca(vectors), texts));
}

function cell(value) {
  const made = element("td", { class: "number", text: value.toFixed(3) });
  const share = Math.max(0, Math.min(1, value));
  made.style.background = `hsl(210 70% ${95 - 55 * share}%)`;
  made.style.color = share > 0.6 ? "#fff" : "#1a1d21";
  return made;
}

function map(points, texts) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", "The texts on the two directions in which their vectors differ most");
  const most = Math.max(1e-9, ...points.flat().map(Math.abs));
  const dots = points.map(([x, y]) => [WIDTH / 2 + ((WIDTH / 2 - 50) * x) / most, HEIGHT / 2 - ((HEIGHT / 2 - 25) * y) / most]);
  const words = texts.map(short), places = labelPlaces(dots, words, WIDTH);
  dots.forEach(([x, y], i) => {
    const dot = document.createElementNS(SVG, "circle"), label = document.createElementNS(SVG, "text");
    dot.setAttribute("cx", x); dot.setAttribute("cy", y); dot.setAttribute("r", 4);
    label.setAttribute("x", places[i][0]); label.setAttribute("y", places[i][1]);
    label.textContent = words[i];
    svg.append(dot, label);
  });
  return svg;
}

async function rank(output) {
  const documents = lines("documents");
  const { results } = await post("v1/rerank", { model: model(), query: byId("query").value, documents });
  output.replaceChildren(table(["Rank", "Score", "Document"], results.map((one, i) => [i + 1, one.relevance_score.toFixed(4), documents[one.index]])));
}

async function classify(output) {
  const texts = lines("classified");
  const { data } = await post("classify", { model: model(), input: texts });
  output.replaceChildren(table(["Text", "Class", "Probability"], data.map((one) => [texts[one.index], one.label ?? "", Math.max(...one.probs).toFixed(4)])));
}

export function table(head, rows) {
  return element("table", {}, element("tr", {}, ...head.map((text) => element("th", { scope: "col", text }))),
    ...rows.map((row) => element("tr", {}, ...row.map((text) => element("td", { text: String(text) })))));
}
