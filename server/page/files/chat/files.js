// Conversations as files: as Markdown for people, and read from the JSON that this page exports.

import { Tree } from "./branches.js";
import { newId } from "./store.js";

const NAMES = { user: "You", assistant: "Model", tool: "Tool" };

/** The branch of a conversation that is shown. @param {import("./store.js").Conversation} one */
export function asMarkdown(one) {
  const parts = [`# ${one.title}`];
  if (one.system) parts.push(`> ${one.system.replaceAll("\n", "\n> ")}`);
  for (const message of Tree.of(one.messages).path) {
    parts.push(`**${message.tool?.name ?? NAMES[message.role]}**`);
    if (message.reasoning) parts.push(`<details><summary>Reasoning</summary>\n\n${message.reasoning.trim()}\n\n</details>`);
    for (const { name } of message.pictures ?? []) parts.push(`*Picture: ${name}*`);
    for (const { name, text } of message.texts ?? []) parts.push(`<details><summary>${name}</summary>\n\n${text.trim()}\n\n</details>`);
    if (message.content.trim()) parts.push(message.content.trim());
    for (const call of message.calls ?? []) parts.push(`Calls \`${call.name}\`:\n\n\`\`\`json\n${call.arguments}\n\`\`\``);
  }
  return `${parts.join("\n\n")}\n`;
}

/**
 * The conversations of an exported file, with new ids, so that none takes the place of another. Raises an Error if it has none.
 * Pictures that are not in the file itself are left out: nobody but the user shall choose what a server fetches.
 * @returns {import("./store.js").Conversation[]}
 */
export function read(text) {
  const list = [JSON.parse(text)].flat();
  if (!list.length || !list.every((one) => one && Array.isArray(one.messages))) throw new Error("it has no conversations of this page");
  return list.map((one) => ({
    id: newId(),
    title: String(one.title ?? "Imported").slice(0, 120),
    created: Number(one.created) || Date.now(),
    changed: Number(one.changed) || Date.now(),
    model: String(one.model ?? ""),
    system: String(one.system ?? ""),
    messages: one.messages.filter(({ role }) => role in NAMES).length === one.messages.length ? Tree.of(one.messages.map(harmless)).plain : [],
  }));
}

function harmless(message) {
  const pictures = (message.pictures ?? []).filter(({ url }) => /^data:image\/[a-z]+;base64,/.test(url));
  const texts = (message.texts ?? []).filter(({ name, text }) => typeof name === "string" && typeof text === "string");
  return { ...message, pictures: pictures.length ? pictures : undefined, texts: texts.length ? texts : undefined };
}
