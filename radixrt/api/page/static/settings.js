/** The settings of the requests: model, mode, system prompt, sampling, schema and tools. This browser keeps them. */

import { byId, duration, element } from "./dom.js";
import { json, ServerError } from "./server.js";
import { storedSettings, storeSettings } from "./storage.js";

/** A completion has 16 tokens unless the request says more, which is little to look at. */
const COMPLETION_TOKENS = 256;

/** @type {{id: string, root: string}[]} the models of the server */
let models = [];
/** @type {() => void} */
let changed = () => {};

const form = () => byId("settings");
const value = (name) => form().elements[name].value.trim();

/** @param {() => void} onChange called when another model or mode is chosen */
export function startSettings(onChange) {
  changed = onChange;
  const stored = storedSettings();
  for (const [name, text] of Object.entries(stored)) if (form().elements[name]) form().elements[name].value = text;
  form().addEventListener("submit", (event) => event.preventDefault());
  form().addEventListener("input", () => storeSettings(Object.fromEntries(new FormData(form()))));
  for (const name of ["mode", "model"]) form().elements[name].addEventListener("change", showMode);
  byId("reset-settings").addEventListener("click", () => {
    form().reset();
    storeSettings({});
    for (const refresh of [showMode, checkSchema, checkTools]) refresh();
  });
  byId("schema").addEventListener("input", later(checkSchema, 400));
  byId("tools").addEventListener("input", later(checkTools, 400));
  if (value("schema")) checkSchema();
  if (value("tools")) checkTools();
  showMode();
}

/** Show the models of the server, if there is a choice. */
export async function loadModels() {
  models = (await json("/v1/models")).data;
  const choice = form().elements.model;
  const chosen = choice.value || storedSettings().model;
  choice.replaceChildren(...models.map(({ id }) => element("option", { value: id, text: id, selected: id === chosen })));
  byId("model-choice").hidden = models.length < 2;
  changed();
}

/** The model that the next request asks for. */
export const chosenModel = () => models.find(({ id }) => id === value("model")) ?? models[0];

export const isCompletion = () => value("mode") === "completion";

/** Prompts are texts from now on, for a model without a chat template. */
export function switchToCompletion() {
  form().elements.mode.value = "completion";
  storeSettings(Object.fromEntries(new FormData(form())));
  showMode();
}

function showMode() {
  for (const part of form().querySelectorAll(".chat-only")) part.hidden = isCompletion();
  changed();
}

/** Path and body of a request for the next answer. @param {import("./conversation.js").Conversation} conversation @throws {ServerError} a field is not JSON */
export function requestFor(conversation) {
  const body = {};
  for (const input of form().querySelectorAll(".sampling input")) if (input.value !== "") body[input.name] = input.valueAsNumber;
  if (models.length > 1) body.model = value("model");
  const schema = value("schema");
  if (schema) Object.assign(body, { response_format: responseFormat(parsed(schema, "The JSON schema")), kept_mass: true });
  if (isCompletion()) return { path: "/v1/completions", body: { max_tokens: COMPLETION_TOKENS, ...body, prompt: conversation.text } };
  const system = value("system") ? [{ role: "system", content: value("system") }] : [];
  if (value("tools")) body.tools = parsed(value("tools"), "The list of tools");
  return { path: "/v1/chat/completions", body: { ...body, messages: [...system, ...conversation.requestMessages] } };
}

const responseFormat = (schema) => ({ type: "json_schema", json_schema: { name: "answer", strict: true, schema } });

/** @param {string} text @param {string} what it is, for the error */
function parsed(text, what) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new ServerError(0, `${what} is not JSON: ${error.message}.`);
  }
}

/** Call a function when its events have paused. @param {() => void} work @param {number} pause_ms */
function later(work, pause_ms) {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(work, pause_ms);
  };
}

// ------------------------------------------------------------ verdicts

/** @param {HTMLElement} place @param {string} kind "good", "bad", "warning" or "" @param {...(Node|string)} content */
function verdict(place, kind, ...content) {
  place.className = `verdict ${kind}`;
  place.replaceChildren(...content);
}

async function checkSchema() {
  const place = byId("schema-verdict");
  const text = value("schema");
  if (!text) return verdict(place, "");
  let shown;
  try {
    const report = await json("/v1/grammar/compile", { body: { response_format: responseFormat(parsed(text, "This")) } });
    shown = [report.exact && !report.slow.length ? "good" : "warning", ...reportOf(report)];
  } catch (error) {
    shown = ["bad", error.message, error.details?.advice ? element("p", { class: "hint", text: error.details.advice }) : ""];
  }
  if (text === value("schema")) verdict(place, ...shown);
}

/** @param {any} report of /v1/grammar/compile */
function reportOf(report) {
  const list = (title, findings) => findings.length === 0 ? [] : [element("p", { text: title }), element("ul", {}, ...findings.map(line))];
  const line = ({ pointer, keyword, message, advice }) =>
    element("li", {}, element("code", { text: pointer || keyword || "the schema" }), ` ${message}`, advice && element("p", { class: "hint", text: advice }));
  return [
    `${report.exact ? "Enforced" : "Held"} by ${report.backend}; compiled in ${duration(report.compile_ms / 1e3)}.`,
    ...list("Checked once it is complete, and tried again if it is wrong:", report.checked),
    ...list("Slow:", report.slow),
    ...list("Not enforced:", report.unenforced),
  ];
}

function checkTools() {
  const place = byId("tools-verdict");
  const text = value("tools");
  if (!text) return verdict(place, "");
  try {
    const tools = parsed(text, "This");
    const names = tools.map((tool) => tool.function.name);
    verdict(place, "good", `${names.length === 1 ? "One tool" : `${names.length} tools`}: ${names.join(", ")}.`);
  } catch (error) {
    verdict(place, "bad", error instanceof ServerError ? error.message : 'A list of {"type": "function", "function": {"name": …}} is needed.');
  }
}
