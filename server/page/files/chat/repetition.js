// The guard against answers without an end: small models at temperature 0 say the same again and again.

const LONG = 1200, TIMES = 6, LOOKED_AT = 3000;

/**
 * Whether a text ends in one piece that is repeated for LONG characters and TIMES times. Numbers of a list do not count.
 * Reads the end backwards as Knuth, Morris and Pratt do: `border[i]` is the length by which its beginning and end overlap.
 */
export function repeats(text) {
  if (text.length < LONG) return false;
  const end = [...text.slice(-LOOKED_AT).replace(/^[ \t]*\d+[.)] (?=\p{L})/gmu, "")].reverse(), border = new Uint16Array(end.length);
  for (let i = 1; i < end.length; i++) {
    let length = border[i - 1];
    while (length && end[i] !== end[length]) length = border[length - 1];
    if (end[i] === end[length]) length += 1;
    border[i] = length;
    if (i + 1 >= LONG && (i + 1 - length) * TIMES <= i + 1) return true;
  }
  return false;
}
