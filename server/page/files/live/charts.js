// A small chart: lines over the last seconds, with axes, units and the value of now, or of the moment that is pointed at.

import { element, svg } from "../dom.js";

const HEIGHT = 132, LEFT = 38, RIGHT = 8, TOP = 8, BOTTOM = 20;

/**
 * @typedef {object} Series
 * @property {string} name
 * @property {(?number)[]} values  one for each second; null where there is none
 */

export class Chart {
  /** @param {number} [most]  the end of the axis, if it is always the same */
  constructor(title, unit, most) {
    Object.assign(this, { title, unit, most });
    this.values = element("span", { class: "values" });
    this.picture = svg("svg", { role: "img" });
    this.figure = element("figure", { class: "chart" }, element("figcaption", {}, element("b", { text: title }), element("span", { class: "unit", text: unit }), this.values), this.picture);
  }

  /** @param {Series[]} series  @param {?number} back  how many seconds ago is pointed at */
  draw(series, back) {
    const width = Math.max(200, this.picture.clientWidth), count = series[0].values.length, span = Math.max(60, count - 1);
    const shown = (values) => values[Math.max(0, count - 1 - (back ?? 0))];
    const all = series.flatMap(({ values }) => values).filter((value) => value !== null);
    const top = this.most ?? nice(Math.max(0, ...all));
    const x = (i) => LEFT + ((width - LEFT - RIGHT) * (span - (count - 1 - i))) / span, y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - Math.min(1, value / top));
    this.values.replaceChildren(...series.map(({ name, values }, i) => element("span", { class: `s${i}` }, series.length > 1 ? `${name} ` : "", element("b", { text: words(shown(values)) }))));
    this.picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.picture.setAttribute("aria-label", `${this.title}, ${this.unit}, last ${count} seconds: ${series.map(({ name, values }) => `${name} ${words(shown(values))} now, at most ${words(Math.max(0, ...values))}`).join("; ")}`);
    this.picture.replaceChildren(
      ...[0, top / 2, top].flatMap((value) => [svg("line", { x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }), svg("text", { x: LEFT - 6, y: y(value) + 3.5, class: "end", text: words(value) })]),
      ...[span, span / 2, 0].map((seconds) => svg("text", { x: x(count - 1 - seconds), y: HEIGHT - 5, class: seconds === span ? "" : seconds ? "middle" : "end", text: ago(seconds) })),
      ...series.flatMap(({ values }, i) => runs(values).map((run) => svg("polyline", { class: `s${i}`, points: run.map((at) => `${x(at).toFixed(1)},${y(values[at]).toFixed(1)}`).join(" ") }))),
      ...(back === null ? [] : [svg("line", { class: "here", x1: x(count - 1 - back), x2: x(count - 1 - back), y1: TOP, y2: HEIGHT - BOTTOM })]),
    );
    this.span = span;
  }

  /** How many seconds ago a place of the pointer stands for. */
  backAt(clientX) {
    const box = this.picture.getBoundingClientRect();
    return Math.round(this.span * Math.min(1, Math.max(0, 1 - (clientX - box.left - LEFT) / (box.width - LEFT - RIGHT))));
  }
}

/** The stretches of values that are there, as lists of places. */
function runs(values) {
  const found = [];
  values.forEach((value, i) => {
    if (value === null) return;
    if (i && values[i - 1] !== null && found.length) found.at(-1).push(i); else found.push([i]);
  });
  return found;
}

/** The least of 1, 2, 5, 10, 20, ... that is not below a value. */
export function nice(value) {
  if (value <= 1) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}

const ago = (seconds) => (!seconds ? "now" : seconds < 120 ? `−${Math.round(seconds)} s` : `−${(seconds / 60).toFixed(seconds % 60 ? 1 : 0)} min`);

function words(value) {
  if (value === null || value === undefined) return "–";
  return value >= 10_000 ? `${(value / 1000).toFixed(0)}k` : value >= 100 || Number.isInteger(value) ? value.toFixed(0) : value.toFixed(value < 1 ? 2 : 1).replace(/\.?0+$/, "");
}
