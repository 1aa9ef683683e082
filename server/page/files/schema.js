// Whether a value fits a JSON Schema: the keywords that people write by hand. Others are named, not guessed.

const KNOWN = new Set(["type", "enum", "const", "properties", "required", "additionalProperties", "items", "minItems", "maxItems",
  "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "pattern", "anyOf", "allOf", "$ref", "$defs",
  "title", "description", "default", "examples", "$schema"]);

const typeOf = (value) => (value === null ? "null" : Array.isArray(value) ? "array" : typeof value);
const hasType = (value, type) => type === typeOf(value) || (type === "integer" && Number.isInteger(value));
const has = (object, name) => Object.hasOwn(object, name);

// Objects are equal whatever the order of their members.
function same(a, b) {
  if (typeOf(a) !== typeOf(b) || typeof a !== "object" || a === null) return a === b;
  const names = Object.keys(a);
  return names.length === Object.keys(b).length && names.every((name) => has(b, name) && same(a[name], b[name]));
}

// What is wrong with a value, as "place: reason"; an empty list if nothing is.
export function misfits(value, schema, root = schema, place = "$") {
  if (schema === true) return [];
  if (schema === false) return [`${place}: nothing is allowed here`];
  const unknown = Object.keys(schema).find((name) => !KNOWN.has(name));
  if (unknown) return [`${place}: this page does not check ${unknown}`];
  if (schema.$ref) return misfits(value, referred(schema.$ref, root), root, place);
  const found = [], wrong = (is, reason) => is && found.push(`${place}: ${reason}`);
  const types = [schema.type ?? []].flat();
  wrong(types.length && !types.some((type) => hasType(value, type)), `is ${typeOf(value)}, not ${types.join(" or ")}`);
  wrong(schema.enum && !schema.enum.some((one) => same(one, value)), `is none of ${JSON.stringify(schema.enum)}`);
  wrong(has(schema, "const") && !same(schema.const, value), `is not ${JSON.stringify(schema.const)}`);
  for (const one of schema.allOf ?? []) found.push(...misfits(value, one, root, place));
  wrong(schema.anyOf?.every((one) => misfits(value, one, root, place).length), "fits none of anyOf");
  const inside = { number: ofNumber, string: ofString, array: ofArray, object: ofObject }[typeOf(value)];
  inside?.(value, schema, wrong, (item, form, name) => found.push(...misfits(item, form, root, `${place}${name}`)));
  return found;
}

function referred(path, root) {
  const names = path.split("/").slice(1).map((name) => name.replaceAll("~1", "/").replaceAll("~0", "~"));
  return names.reduce((at, name) => at?.[name], root) ?? { [`$ref to ${path}`]: true };
}

function ofNumber(value, schema, wrong) {
  wrong(value < schema.minimum, `is below ${schema.minimum}`);
  wrong(value > schema.maximum, `is above ${schema.maximum}`);
  wrong(value <= schema.exclusiveMinimum, `is not above ${schema.exclusiveMinimum}`);
  wrong(value >= schema.exclusiveMaximum, `is not below ${schema.exclusiveMaximum}`);
}

function ofString(value, schema, wrong) {
  const length = [...value].length;
  wrong(length < schema.minLength, `is shorter than ${schema.minLength}`);
  wrong(length > schema.maxLength, `is longer than ${schema.maxLength}`);
  wrong(schema.pattern && !new RegExp(schema.pattern, "u").test(value), `does not match ${schema.pattern}`);
}

function ofArray(value, schema, wrong, each) {
  wrong(value.length < schema.minItems, `has fewer than ${schema.minItems} items`);
  wrong(value.length > schema.maxItems, `has more than ${schema.maxItems} items`);
  if (schema.items !== undefined) value.forEach((item, i) => each(item, schema.items, `[${i}]`));
}

function ofObject(value, schema, wrong, each) {
  for (const name of schema.required ?? []) wrong(!has(value, name), `has no ${name}`);
  for (const [name, item] of Object.entries(value)) {
    if (has(schema.properties ?? {}, name)) each(item, schema.properties[name], `.${name}`);
    else if (schema.additionalProperties !== undefined) each(item, schema.additionalProperties, `.${name}`);
  }
}

// A sentence on an answer: whether it is JSON, and fits.
export function judge(text, schema) {
  let value;
  try { value = JSON.parse(text); } catch (error) { return { fits: false, words: `The answer is no JSON: ${error.message}` }; }
  try {
    const found = misfits(value, schema);
    return found.length ? { fits: false, words: `The answer does not fit the schema: ${found.slice(0, 3).join("; ")}` } : { fits: true, words: "The answer fits the schema." };
  } catch (error) {
    return { fits: false, words: `The schema cannot be used: ${error.message}` };
  }
}
