// A conversation as a tree: what is edited or answered anew becomes a branch beside the old one, and none is lost.

/**
 * @typedef {object} Message
 * @property {"user" | "assistant" | "tool"} role
 * @property {string} content
 * @property {Message | Tree["root"]} parent
 * @property {Message[]} children
 * @property {?Message} chosen  the child whose branch is shown
 * And what `KEPT` names, if it has any.
 */

/** The fields of a message that are kept, beside its place in the tree. */
const KEPT = ["role", "content", "pictures", "texts", "reasoning", "calls", "tool", "tokens", "pace", "used", "cut", "error", "unfinished", "repeats", "edited"];

export class Tree {
  constructor() {
    this.root = { children: [], chosen: null };
  }

  /** The messages of the branch that is shown, from the first to the last. */
  get path() {
    const found = [];
    for (let at = this.root.chosen; at; at = at.chosen) found.push(at);
    return found;
  }

  get last() {
    return this.path.at(-1) ?? this.root;
  }

  /** A new message behind another one, and the end of the branch that is shown from now on. */
  add(parent, role, content, more = {}) {
    const made = { role, content, ...more, parent, children: [], chosen: null };
    parent.children.push(made);
    parent.chosen = made;
    return made;
  }

  /** Shows the branch before (-1) or after (1) that of a message; returns the message that stands in its place then. */
  turn(message, step) {
    const { children } = message.parent;
    message.parent.chosen = children[children.indexOf(message) + step] ?? message;
    return message.parent.chosen;
  }

  /** Takes a message out. What followed it stands in its place, but the results of its calls go, too. */
  remove(message) {
    const { parent } = message, behind = ({ children }) => children.flatMap((child) => (child.role === "tool" ? behind(child) : [child]));
    let { chosen } = message;
    while (chosen?.role === "tool") ({ chosen } = chosen);
    const rest = behind(message), at = parent.children.indexOf(message);
    for (const one of rest) one.parent = parent;
    parent.children.splice(at, 1, ...rest);
    parent.chosen = chosen ?? parent.children[at] ?? parent.children[at - 1] ?? null;
  }

  /** Shows the branch on which a message stands. */
  reveal(message) {
    for (let at = message; at.parent; at = at.parent) at.parent.chosen = at;
  }

  /** All messages, of all branches. */
  get all() {
    const found = [...this.root.children];
    for (const one of found) found.push(...one.children);
    return found;
  }

  /** All messages as a flat list, each with the place of the one before it (-1 is none) and whether its branch is shown. */
  get plain() {
    const list = [], waiting = [[this.root, -1]];
    for (const [node, at] of waiting) {
      for (const child of node.children) {
        const fields = KEPT.filter((name) => child[name] !== undefined).map((name) => [name, child[name]]);
        list.push({ ...Object.fromEntries(fields), after: at, shown: node.chosen === child });
        waiting.push([child, list.length - 1]);
      }
    }
    return list;
  }

  /** The tree of such a list; what it does not know of a message is left out. */
  static of(list) {
    const tree = new Tree(), made = [], chosen = [];
    for (const one of list) {
      const parent = made[one.after] ?? tree.root;
      const fields = KEPT.filter((name) => one[name] !== undefined).map((name) => [name, one[name]]);
      made.push(tree.add(parent, one.role, String(one.content ?? ""), Object.fromEntries(fields)));
      if (one.shown) chosen.push(made.at(-1));
    }
    for (const message of chosen) message.parent.chosen = message;
    return tree;
  }
}

/** Which of the messages in the same place one is, counted from 1, and of how many. */
export function standing(message) {
  const { children } = message.parent;
  return [children.indexOf(message) + 1, children.length];
}
