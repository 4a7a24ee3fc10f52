/** Prompts for an empty page that the served model can answer. */

/** The built-in model knows nothing but the facts in its prompt. */
const DEMO = [
  "The owner of Vidur is Noval. The port of Vidur is Teska. What is the owner of Vidur?",
  "The mayor of Dorvel is Kanuta. The river of Dorvel is Smeno. What is the river of Dorvel?",
  "The captain of Karimo is Jelan. The cargo of Karimo is glass. What is the cargo of Karimo?",
];

const CHAT = [
  "Explain in three sentences how a prefix cache makes a language model answer faster.",
  "Write a Python function that merges two sorted lists, and a test for it.",
  "Compare three programming languages for a command-line tool, in a table.",
];

const COMPLETION = ["The capital of France is", "def fibonacci(n):\n", "Once upon a time, in a town by the sea,"];

/** @param {{root?: string}|undefined} model undefined: it is not known yet @param {boolean} isCompletion @returns {string[]} */
export function examplesFor(model, isCompletion) {
  if (!model) return [];
  if (isCompletion) return COMPLETION;
  return model.root?.endsWith("demo_model") ? DEMO : CHAT;
}
