// Live: what the server does now. The stream is open only while this tab is seen; the curves are kept here.

import { byId, element, events } from "./api.js";
import { quantile } from "./math.js";
import { table } from "./vectors.js";

const KEPT = 600, RECENT = 60;
const CURVES = ["Output tokens a second", "Prompt tokens a second", "Running", "Waiting", "Cache in use, %"];
const seen = [];
let open = null;

export function endLive() {
  open?.abort();
  open = null;
}

export async function beginLive() {
  if (open) return;
  const mine = open = new AbortController();
  while (open === mine) {
    try {
      for await (const now of events("live/events", undefined, mine.signal)) look(now);
    } catch (error) {
      if (open === mine) byId("live-state").textContent = error.message;
    }
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}

function look(now) {
  if (seen.length && now.generation_tokens < seen.at(-1).generation_tokens) seen.length = 0;  // the process is another one
  seen.push(now);
  if (seen.length > KEPT) seen.shift();
  const loading = now.state === "loading";
  byId("live-state").textContent = loading ? `${now.model} is loading: ${now.stage}, ${Math.round(100 * now.progress)} %` : `${now.model}: ${now.state}${now.reason ? ` (${now.reason})` : ""}`;
  byId("loading").hidden = !loading;
  byId("loading").value = now.progress;
  numbers(now);
  curves();
  byId("replicas").replaceChildren(table(["Replica", "Ranks", "State", "Running", "Waiting", "Cache", "Preemptions"],
    now.replicas.map((one) => [one.number, now.ranks, one.state === "starts" ? `${one.phase}, ${Math.round(100 * one.progress)} %` : one.state, one.running, one.waiting, percent(one.cache), one.preemptions])));
  byId("requests").replaceChildren(now.requests.length
    ? table(["Request", "Age", "Answers", "State"], now.requests.map((one) => [one.id, `${one.age.toFixed(1)} s`, one.answers, one.begun ? "answered" : "waits"]))
    : element("p", { class: "help", text: "None." }));
}

const sum = (now, field) => now.replicas.reduce((total, one) => total + one[field], 0);
const percent = (share) => `${(100 * share).toFixed(0)} %`;
const milliseconds = (seconds) => (seconds === null ? "–" : `${(1000 * seconds).toFixed(seconds < 0.1 ? 1 : 0)} ms`);
const cache = (now) => (now.replicas.length ? sum(now, "cache") / now.replicas.length : 0);

function rate(a, b, of) {
  const seconds = b.time - a.time;
  return seconds > 0 ? Math.max(0, of(b) - of(a)) / seconds : 0;
}

function numbers(now) {
  const last = seen.at(-2) ?? now, minute = seen.at(-1 - Math.min(RECENT, seen.length - 1));
  const steps = sum(now, "steps") - sum(last, "steps"), asked = sum(now, "prefix_queries");
  const ofStep = (field, digits) => (steps > 0 ? ((sum(now, field) - sum(last, field)) / steps).toFixed(digits) : "–");
  // Of the last minute; of all time for a page that has just been opened.
  const recent = (of, share) => milliseconds(quantile(minute === now ? null : minute[of], now[of], share));
  const shown = [
    ["Output tokens/s", rate(last, now, (one) => one.generation_tokens).toFixed(0)],
    ["Prompt tokens/s", rate(last, now, (one) => one.prompt_tokens).toFixed(0)],
    ["Running", sum(now, "running")],
    ["Waiting", sum(now, "waiting")],
    ["First token, median", recent("first_token", 0.5)],
    ["First token, p99", recent("first_token", 0.99)],
    ["Time per token, median", recent("per_token", 0.5)],
    ["Time per token, p99", recent("per_token", 0.99)],
    ["Cache in use", percent(cache(now))],
    ["Prefixes found", asked ? percent(sum(now, "prefix_hits") / asked) : "–"],
    ["A step takes", steps > 0 ? milliseconds((sum(now, "busy") - sum(last, "busy")) / steps) : "–"],
    ["Tokens in a step", ofStep("step_tokens", 1)],
    ["Decoding in a step", ofStep("decoding", 1)],
    ["Prompts in a step", ofStep("prompts", 2)],
    ["Texts in a step", ofStep("texts", 2)],
    ["Engines busy", percent(rate(last, now, (one) => sum(one, "busy")) / Math.max(1, now.replicas.length))],
  ];
  byId("numbers").replaceChildren(...shown.map(([name, value]) => element("div", {}, element("dt", { text: name }), element("dd", { text: String(value) }))));
}

function curves() {
  const pairs = seen.slice(1).map((now, i) => [seen[i], now]);
  const values = [
    pairs.map(([a, b]) => rate(a, b, (one) => one.generation_tokens)),
    pairs.map(([a, b]) => rate(a, b, (one) => one.prompt_tokens)),
    seen.map((now) => sum(now, "running")),
    seen.map((now) => sum(now, "waiting")),
    seen.map((now) => 100 * cache(now)),
  ];
  byId("curves").replaceChildren(...CURVES.map((name, i) => curve(name, values[i])));
}

function curve(name, values) {
  const most = Math.max(1, ...values), svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const wide = Math.max(RECENT, values.length);
  svg.setAttribute("viewBox", `0 0 ${wide} 100`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${name}, last ${values.length} seconds: now ${Math.round(values.at(-1) ?? 0)}, at most ${Math.round(most)}`);
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  line.setAttribute("points", values.map((value, i) => `${wide - values.length + i},${98 - (96 * value) / most}`).join(" "));
  svg.append(line);
  return element("figure", {}, element("figcaption", { class: "help", text: `${name} (up to ${Math.round(most)})` }), svg);
}
