// A conversation as a tree: what is edited or answered anew becomes a branch beside the old one, and none is lost.

export class Tree {
  constructor() {
    this.root = { children: [], chosen: null };
  }

  // The messages of the branch that is shown, from the first to the last.
  get path() {
    const found = [];
    for (let at = this.root.chosen; at; at = at.chosen) found.push(at);
    return found;
  }

  get last() {
    return this.path.at(-1) ?? this.root;
  }

  // A new message behind another one, and the end of the branch that is shown from now on.
  add(parent, role, content) {
    const made = { role, content, parent, children: [], chosen: null };
    parent.children.push(made);
    parent.chosen = made;
    return made;
  }

  // Shows the branch before (-1) or after (1) that of a message; returns the message that stands in its place then.
  turn(message, step) {
    const { children } = message.parent;
    message.parent.chosen = children[children.indexOf(message) + step] ?? message;
    return message.parent.chosen;
  }
}

// Which of the messages in the same place one is, counted from 1, and of how many.
export function standing(message) {
  const { children } = message.parent;
  return [children.indexOf(message) + 1, children.length];
}
