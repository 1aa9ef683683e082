// Words that were searched for: in which message of a conversation they are, and their marks in it.

/** The first message with all of the words, or else with one of them; on the branch that is shown if it is there. @param {import("./branches.js").Tree} tree */
export function findIn(tree, words) {
  const has = (message) => (word) => message.content.toLowerCase().includes(word), all = [...tree.path, ...tree.all];
  return all.find((one) => words.every(has(one))) ?? all.find((one) => words.some(has(one)));
}

/** Marks the words in an element; returns what has the first of them. Browsers without the API of highlights mark nothing. */
export function markWords(item, words) {
  const ranges = [], texts = document.createTreeWalker(item, NodeFilter.SHOW_TEXT);
  for (let node = texts.nextNode(); node; node = texts.nextNode()) {
    const text = node.data.toLowerCase();
    for (const word of words) {
      for (let at = text.indexOf(word); at >= 0; at = text.indexOf(word, at + word.length)) {
        ranges.push(new StaticRange({ startContainer: node, startOffset: at, endContainer: node, endOffset: at + word.length }));
      }
    }
  }
  globalThis.CSS?.highlights?.set("found", new Highlight(...ranges));
  return ranges[0]?.startContainer.parentElement ?? item;
}
