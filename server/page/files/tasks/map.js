// A map of vectors: each text at its place on the two directions in which they differ most.

import { svg } from "../dom.js";
import { labelPlaces, pca } from "./vector_math.js";

const WIDTH = 760, HEIGHT = 340;
const short = (text) => (text.length > 36 ? `${text.slice(0, 35)}…` : text);

export function drawMap(vectors, texts) {
  const points = pca(vectors), most = Math.max(1e-9, ...points.flat().map(Math.abs));
  const dots = points.map(([x, y]) => [WIDTH / 2 + ((WIDTH / 2 - 50) * x) / most, HEIGHT / 2 - ((HEIGHT / 2 - 25) * y) / most]);
  const words = texts.map(short), places = labelPlaces(dots, words, WIDTH, 7, 17);
  const label = "The texts on the two directions in which their vectors differ most";
  return svg("svg", { class: "map", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label },
    ...[[WIDTH / 2, 0, WIDTH / 2, HEIGHT], [0, HEIGHT / 2, WIDTH, HEIGHT / 2]].map(([x1, y1, x2, y2]) => svg("line", { x1, y1, x2, y2 })),
    ...dots.flatMap(([cx, cy], i) => [svg("circle", { cx, cy, r: 4.5 }), svg("text", { x: places[i][0], y: places[i][1], text: words[i] })]));
}
