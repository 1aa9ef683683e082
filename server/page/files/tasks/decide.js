// Asking about a text: questions with fixed answers, each of which the model gives a probability.

import { post } from "../api.js";
import { byId, element, iconButton } from "../dom.js";
import { model } from "../models.js";
import { probabilityBars, titled } from "./bars.js";

/** @typedef {["predicate" | "choice" | "score", string, string?]} Question  its kind, its words, and its options or levels as lines */

/** What a kind of question is called, and the label of its options. */
const KINDS = {
  predicate: ["Yes or no", ""],
  choice: ["Choice: one of several options", "Options, one in each line"],
  score: ["Score: a level on a scale", "Levels, one in each line, from the lowest to the highest"],
};

export const questionList = (id) => element("ol", { id, class: "questions", "aria-label": "Questions" });

/** Replaces the questions of a list. @param {Question[]} questions */
export function fillQuestions(list, questions) {
  list.replaceChildren();
  for (const question of questions) addQuestion(list, question);
}

export function addButton() {
  return [element("button", { type: "button", text: "Add a question", onclick: () => addQuestion(byId("questions"), ["predicate", ""]).focus() })];
}

/** Adds a question to a list, and returns the field of its words. @param {Question} question */
function addQuestion(list, [kind, words, options = ""]) {
  const kinds = element("select", { "aria-label": "Kind of question", onchange: showOptions }, ...Object.entries(KINDS).map(([value, [text]]) => element("option", { value, text })));
  const field = element("input", { required: true, autocomplete: "off" }), lines = element("textarea", { rows: 3, required: true });
  const title = element("span"), label = element("label", {}, title, lines);
  const item = element("li", {}, element("fieldset", {}, element("legend"),
    element("div", { class: "row" }, kinds, iconButton("delete", "Remove this question", () => removeQuestion(list, item))),
    element("label", {}, "Question or statement", field), label));
  function showOptions() {
    title.textContent = KINDS[kinds.value][1];
    label.hidden = lines.disabled = !title.textContent;
  }
  kinds.value = kind;
  field.value = words;
  lines.value = options;
  showOptions();
  list.append(item);
  count(list);
  return field;
}

function removeQuestion(list, item) {
  const near = item.nextElementSibling ?? item.previousElementSibling;
  item.remove();
  count(list);
  near.querySelector("input").focus();
}

/** Numbers the questions; the last one that is left cannot be removed. */
function count(list) {
  [...list.children].forEach((item, i) => {
    item.querySelector("legend").textContent = `Question ${i + 1}`;
    item.querySelector("button").disabled = list.children.length < 2;
  });
}

export async function decide() {
  const questions = [...byId("questions").children].map(asked);
  const { answers } = await post("v1/decisions", { model: model(), input: byId("about").value, questions });
  return answers.map((answer, i) => titled(questions[i].instructions, ...shown(answer)));
}

/** A question as the API has it; errors call it by its name. */
function asked(item, i) {
  const [type, instructions, text] = [...item.querySelectorAll("select, input, textarea")].map((field) => field.value);
  const options = text.split("\n").map((line) => line.trim()).filter(Boolean), question = { type, name: `Question ${i + 1}`, instructions };
  if (type === "choice") question.choices = options.map((value) => ({ value }));
  if (type === "score") question.levels = options.map((label) => ({ label }));
  return question;
}

function shown({ type, probability, probabilities, score }) {
  if (type === "refusal") return [element("p", { class: "error", text: "The model could not answer this question. Ask it again, or with fewer or shorter options." })];
  if (type === "predicate") return [probabilityBars([["Yes", probability], ["No", 1 - probability]])];
  const shares = probabilities.map(({ value, label, probability }) => [label ?? value, probability]);
  const mean = () => `The mean level is ${score.toFixed(2)}, where ${shares[0][0]} is 0 and ${shares.at(-1)[0]} is ${shares.length - 1}.`;
  return [probabilityBars(shares), ...(type === "score" ? [element("p", { class: "help", text: mean() })] : [])];
}
