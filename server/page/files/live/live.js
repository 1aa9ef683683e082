// Live: what the server does now. The stream is open only while this view is seen; the points of the charts are kept here.

import { events } from "../api.js";
import { byId, element } from "../dom.js";
import { Chart } from "./charts.js";
import { quantile } from "./quantile.js";

const KEPT = 600, RECENT = 60;
const sum = (now, field) => now.replicas.reduce((total, one) => total + one[field], 0);
const cache = (now) => (now.replicas.length ? (100 * sum(now, "cache")) / now.replicas.length : 0);
const percent = (share) => `${(100 * share).toFixed(0)} %`;

/** Title, unit, names of the lines, and their values at a moment: between two events, or over the last minute (`then`). */
const CHARTS = [
  ["Output", "tokens/s", ["Output"], ({ last, now, seconds }) => [(now.generation_tokens - last.generation_tokens) / seconds]],
  ["Prompts", "tokens/s", ["Prompts"], ({ last, now, seconds }) => [(now.prompt_tokens - last.prompt_tokens) / seconds]],
  ["Requests", "count", ["running", "waiting"], ({ now }) => [sum(now, "running"), sum(now, "waiting")]],
  ["First token", "ms, last minute", ["median", "p99"], ({ then, now }) => ofMinute(then, now, "first_token")],
  ["Time per token", "ms, last minute", ["median", "p99"], ({ then, now }) => ofMinute(then, now, "per_token")],
  ["A step takes", "ms", ["A step"], ({ last, now, steps }) => [steps ? (1000 * (sum(now, "busy") - sum(last, "busy"))) / steps : null]],
  ["Tokens in a step", "count", ["Tokens"], (moment) => [ofStep(moment, "step_tokens")]],
  ["Rows in a step", "count", ["decoding", "prompts", "texts"], (moment) => ["decoding", "prompts", "texts"].map((field) => ofStep(moment, field))],
  ["Use", "%", ["engines", "cache", "prefixes"], ({ last, now, seconds }) => [
    Math.min(100, (100 * (sum(now, "busy") - sum(last, "busy"))) / seconds / Math.max(1, now.replicas.length)), cache(now),
    sum(now, "prefix_queries") ? (100 * sum(now, "prefix_hits")) / sum(now, "prefix_queries") : null]],
];

function ofMinute(then, now, field) {
  return [0.5, 0.99].map((share) => { const found = quantile(then[field], now[field], share); return found === null ? null : 1000 * found; });
}

const ofStep = ({ last, now, steps }, field) => (steps ? (sum(now, field) - sum(last, field)) / steps : null);

/** The events of the last minute, and the values of every chart at each of the last KEPT seconds. */
const recent = [];
let points = [];
let charts = null;
let open = null;
let back = null;

export function endLive() {
  open?.abort();
  open = null;
}

export async function beginLive() {
  if (open) return;
  build();
  const mine = open = new AbortController();
  while (open === mine) {
    try {
      for await (const now of events("live/events", undefined, mine.signal)) look(now);
    } catch (error) {
      if (open === mine) byId("live-state").textContent = error.message;
      if (error.status === 401) return endLive();  // nobody is asked for a key again and again
    }
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}

function build() {
  if (charts) return;
  charts = CHARTS.map(([title, unit]) => new Chart(title, unit, unit === "%" ? 100 : undefined));
  const grid = element("div", { id: "charts" }, ...charts.map(({ figure }) => figure));
  const point = (to) => { back = to; draw(); };
  grid.addEventListener("pointermove", (event) => {
    const chart = charts.find(({ picture }) => picture.contains(event.target));
    point(chart && points.length ? Math.min(points.length - 1, chart.backAt(event.clientX)) : null);
  });
  grid.addEventListener("pointerleave", () => point(null));
  addEventListener("resize", draw);
  byId("live").replaceChildren(element("div", { class: "inside wide" },
    element("h2", { text: "Live" }), element("p", { class: "help", id: "live-state", role: "status" }), element("progress", { id: "loading", max: 1, value: 0, hidden: true, "aria-label": "Loading" }),
    grid, element("h3", { text: "Replicas" }), element("div", { id: "replicas", class: "scroll" }),
    element("h3", { text: "Requests in flight" }), element("div", { id: "requests", class: "scroll" })));
}

function look(now) {
  if (recent.length && now.generation_tokens < recent.at(-1).generation_tokens) { recent.length = 0; points = []; }  // the process is another one
  const last = recent.at(-1);
  recent.push(now);
  if (recent.length > RECENT + 1) recent.shift();
  if (last && now.time > last.time) {
    // All that was counted before the page was opened is no part of the last minute.
    const moment = { last, now, then: recent[0], seconds: now.time - last.time, steps: Math.max(0, sum(now, "steps") - sum(last, "steps")) };
    points.push(CHARTS.map(([, , , values]) => values(moment)));
    if (points.length > KEPT) points.shift();
  }
  const loading = now.state === "loading", says = loading ? `${now.model} is loading: ${now.stage}, ${percent(now.progress)}` : `${now.model}: ${now.state}${now.reason ? ` (${now.reason})` : ""}`;
  if (byId("live-state").textContent !== says) byId("live-state").textContent = says;
  byId("loading").hidden = !loading;
  byId("loading").value = now.progress;
  draw();
  byId("replicas").replaceChildren(table(["Replica", "Ranks", "State", "Running", "Waiting", "Cache", "Preemptions"],
    now.replicas.map((one) => [one.number, now.ranks, one.state === "starts" ? `${one.phase}, ${percent(one.progress)}` : one.state, one.running, one.waiting, percent(one.cache), one.preemptions])));
  byId("requests").replaceChildren(now.requests.length
    ? table(["Request", "Age", "Answers", "State"], now.requests.map((one) => [one.id, `${one.age.toFixed(1)} s`, one.answers, one.begun ? "answered" : "waits"]))
    : element("p", { class: "help", text: "None." }));
}

function draw() {
  if (!points.length) return;
  charts.forEach((chart, i) => chart.draw(CHARTS[i][2].map((name, line) => ({ name, values: points.map((point) => point[i][line]) })), back));
}

function table(head, rows) {
  return element("table", {}, element("thead", {}, element("tr", {}, ...head.map((text) => element("th", { scope: "col", text })))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((text) => element("td", { text: String(text) }))))));
}
