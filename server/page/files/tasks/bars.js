// Results with a title, and bars with values.

import { element } from "../dom.js";

export const titled = (title, ...inside) => element("figure", {}, element("figcaption", { text: title }), ...inside);

export function bar(words, value, share) {
  const fill = element("span", { class: "fill" });
  fill.style.width = `${(100 * Math.max(0, Math.min(1, share))).toFixed(1)}%`;
  return element("li", {}, element("span", { class: "words", text: words }), element("span", { class: "value", text: value }), element("span", { class: "track" }, fill));
}

/** Bars of probabilities. @param {[string, number][]} shares */
export const probabilityBars = (shares) => element("ol", { class: "bars" }, ...shares.map(([words, share]) => bar(words, `${(100 * share).toFixed(1)} %`, share)));
