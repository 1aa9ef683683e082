// Vectors and numbers, without a page: also run by tests.

export function cosine(a, b) {
  let dot = 0, aa = 0, bb = 0;
  for (let i = 0; i < a.length; i++) { dot += a[i] * b[i]; aa += a[i] * a[i]; bb += b[i] * b[i]; }
  return aa && bb ? dot / Math.sqrt(aa * bb) : 0;
}

// The coordinates of each vector on the two directions in which they differ most.
// Power iteration on the Gram matrix: there are few vectors, of many dimensions.
export function pca(vectors) {
  const n = vectors.length, width = vectors[0].length;
  const mean = Array.from({ length: width }, (_, j) => vectors.reduce((sum, v) => sum + v[j], 0) / n);
  const rows = vectors.map((v) => v.map((x, j) => x - mean[j]));
  const gram = rows.map((a) => rows.map((b) => a.reduce((sum, x, j) => sum + x * b[j], 0)));
  const axes = [];
  for (let axis = 0; axis < 2; axis++) {
    let u = rows.map((_, i) => Math.sin(i + 1 + axis)), size = 0;
    for (let round = 0; round < 300; round++) {
      for (const other of axes) {
        const part = u.reduce((sum, x, i) => sum + x * other.u[i], 0);
        u = u.map((x, i) => x - part * other.u[i]);
      }
      const next = gram.map((row) => row.reduce((sum, x, i) => sum + x * u[i], 0));
      size = Math.hypot(...next);
      if (size < 1e-12) { u = u.map(() => 0); break; }
      u = next.map((x) => x / size);
    }
    axes.push({ u, scale: Math.sqrt(Math.max(0, size)) });
  }
  return rows.map((_, i) => axes.map((axis) => axis.u[i] * axis.scale));
}

// Where the labels of points begin, in a field of this width: beside their points, within the field, none over another.
// A label is as wide as its number of letters says.
export function labelPlaces(points, texts, width, letter = 5.6, line = 13) {
  const taken = [], found = [];
  const order = points.map((_, i) => i).sort((a, b) => points[a][1] - points[b][1]);
  for (const i of order) {
    const [px, py] = points[i], wide = letter * texts[i].length;
    const right = px + 8, left = px - 8 - wide, fits = right + wide <= width - 2 ? right : left >= 2 ? left : null;
    const x = fits ?? Math.max(2, width - 2 - wide);
    let y = fits === null ? py - 8 : py + 4;
    const free = () => taken.every(([tx, ty, tw]) => Math.abs(ty - y) >= line || x + wide <= tx || tx + tw <= x);
    while (!free()) y += 1;
    taken.push([x, y, wide]);
    found[i] = [x, y];
  }
  return found;
}
