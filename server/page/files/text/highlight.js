// Code in colours, roughly: comments, strings, numbers and words that most languages reserve.

import { element } from "../dom.js";

const HASH = /^(py|python|sh|bash|shell|zsh|console|rb|ruby|yaml|yml|toml|r|perl|pl|make|makefile|dockerfile|conf|ini|julia|jl|elixir|nix)$/;
const DASH = /^(sql|lua|haskell|hs|ada|elm)$/;
const PLAIN = /^(|text|txt|plain|plaintext|output|markdown|md|diff|csv|log)$/;
const WORDS = new Set(("abstract and as assert async await bool boolean break case catch char class const continue def default defer del delete do double elif else end enum "
  + "except export extends extern false final finally float fn for foreach from func function go goto if impl implements import in instanceof int interface is lambda let "
  + "long loop match mod module mut namespace new nil None nonlocal not null of or package pass pub private protected public raise range return self short signed sizeof "
  + "static str string struct super switch then this throw trait true try type typedef typeof undefined union unless unsigned use using var void while with yield True False "
  + "done echo elseif esac fi local export select insert update create table where group order by join on having limit into values set drop alter distinct").split(" "));

const STRING = String.raw`"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?` + "|`(?:\\\\.|[^`\\\\])*`?";
const NUMBER = String.raw`\b(?:0[xX][\da-fA-F]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\b`;
const WORD = String.raw`[A-Za-z_$][\w$]*`;
const MARKUP = /^(html|xml|svg|vue|jsx|tsx)$/;

/** @returns {(Node | string)[]} */
export function coloured(text, language) {
  if (PLAIN.test(language) || text.length > 100_000) return [text];
  const comment = MARKUP.test(language) ? "<!--[\\s\\S]*?(?:-->|$)" : HASH.test(language) ? "#[^\\n]*" : DASH.test(language) ? "--[^\\n]*" : "\\/\\/[^\\n]*|\\/\\*[\\s\\S]*?(?:\\*\\/|$)";
  const kinds = new RegExp(`(${comment})|(${STRING})|(${NUMBER})|(${WORD})`, "g");
  const made = [];
  let from = 0;
  for (const found of text.matchAll(kinds)) {
    const [whole, isComment, isString, isNumber] = found;
    const kind = isComment ? "c" : isString ? "s" : isNumber ? "n" : isWord(whole, language) ? "k" : text[found.index + whole.length] === "(" ? "f" : "";
    if (!kind) continue;
    if (found.index > from) made.push(text.slice(from, found.index));
    made.push(element("span", { class: `h-${kind}`, text: whole }));
    from = found.index + whole.length;
  }
  return from < text.length ? [...made, text.slice(from)] : made;
}

const isWord = (word, language) => WORDS.has(language === "sql" ? word.toLowerCase() : word);
