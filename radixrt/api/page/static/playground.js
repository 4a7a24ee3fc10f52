/** The playground: a chat, the settings of its requests, and the share of each prompt that came from the cache. */

import { byId, count, duration, element, percent } from "./dom.js";
import { events, json, send, ServerError } from "./server.js";

/** @typedef {{role: string, content: string, tool_calls?: any[], tool_call_id?: string, name?: string}} Message */

/** @type {Message[]} the conversation without its system prompt */
let conversation = [];
/** @type {AbortController|null} of the answer that is being streamed */
let answering = null;

export function startPlayground() {
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  byId("message").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      submit();
    }
  });
  byId("stop").addEventListener("click", () => answering?.abort());
  byId("retry").addEventListener("click", retry);
  byId("clear").addEventListener("click", () => {
    clear();
    byId("message").focus();
  });
  byId("settings").addEventListener("submit", (event) => event.preventDefault());
  byId("schema").addEventListener("input", later(checkSchema, 400));
  byId("tools").addEventListener("input", later(checkTools, 400));
  clear();
}

/** Call a function when its events have paused. @param {() => void} work @param {number} pause_ms */
function later(work, pause_ms) {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(work, pause_ms);
  };
}

// ------------------------------------------------------------ the conversation

/** The first call of a tool that has no result yet. */
function openCall() {
  const last = conversation.findLastIndex((message) => message.role === "assistant");
  const answered = new Set(conversation.slice(last + 1).map((message) => message.tool_call_id));
  return conversation[last]?.tool_calls?.find((call) => !answered.has(call.id));
}

function submit() {
  const field = byId("message");
  const call = openCall();
  if (answering || (!field.value.trim() && !call)) return;
  /** @type {Message} */
  const message = call
    ? { role: "tool", tool_call_id: call.id, name: call.function.name, content: field.value }
    : { role: "user", content: field.value };
  field.value = "";
  conversation.push(message);
  show(message);
  update();
  if (!openCall()) answer();
}

function retry() {
  const last = conversation.findLastIndex((message) => message.role !== "assistant");
  conversation.length = last + 1;
  const messages = byId("messages");
  while (messages.lastElementChild?.classList.contains("assistant")) messages.lastElementChild.remove();
  answer();
}

function clear() {
  answering?.abort();
  conversation = [];
  byId("messages").replaceChildren(
    element("li", { class: "welcome" },
      element("p", { text: "Chat with the served model." }),
      element("p", { class: "hint", text: "Under each answer stand its tokens, its speed, and the part of the prompt that came from the cache." })),
  );
  update();
}

/** Show which buttons make sense now. */
function update() {
  const call = openCall();
  byId("message-label").textContent = call ? `Result of ${call.function.name}` : "Message";
  byId("send").disabled = Boolean(answering);
  byId("stop").hidden = !answering;
  byId("retry").disabled = Boolean(answering) || !conversation.some((message) => message.role !== "assistant");
  byId("clear").disabled = conversation.length === 0;
}

/** @param {Message} message @returns {HTMLElement} its entry */
function show(message) {
  const names = { user: "You", assistant: "Model", tool: `Result of ${message.name}` };
  const entry = element("li", { class: `message ${message.role}` },
    element("h2", { text: names[message.role] }),
    element("div", { class: "text", text: message.content }));
  const messages = byId("messages");
  messages.querySelector(".welcome")?.remove();
  messages.append(entry);
  messages.scrollTop = messages.scrollHeight;
  return entry;
}

// ------------------------------------------------------------ an answer

async function answer() {
  const entry = show({ role: "assistant", content: "" });
  const message = { role: "assistant", content: "", reasoning_content: "", tool_calls: [] };
  const report = { began: performance.now(), first: 0, usage: null, times: null, finish: "", explanation: null };
  entry.setAttribute("aria-busy", "true");
  answering = new AbortController();
  update();
  try {
    const response = await send("/v1/chat/completions", {
      body: request(),
      signal: answering.signal,
      headers: { "x-radixrt-explain-cache": "1" },
    });
    for await (const event of events(response)) {
      report.first ||= performance.now();
      take(event, message, report);
      draw(entry, message);
    }
  } catch (error) {
    report.finish = error.name === "AbortError" ? "stopped" : "";
    if (!report.finish) entry.append(element("p", { class: "error", role: "alert", text: error.message }));
  }
  answering = null;
  entry.removeAttribute("aria-busy");
  if (message.content || message.tool_calls.length) {
    conversation.push({ role: "assistant", content: message.content, ...(message.tool_calls.length && { tool_calls: message.tool_calls }) });
  }
  entry.append(footer(report));
  byId("messages").scrollTop = byId("messages").scrollHeight;
  update();
}

/** The body of the next request. */
function request() {
  const body = { messages: conversation, stream: true, stream_options: { include_usage: true }, return_times: true };
  const system = byId("system").value.trim();
  if (system) body.messages = [{ role: "system", content: system }, ...conversation];
  for (const input of byId("settings").querySelectorAll("input")) {
    if (input.value !== "") body[input.name] = input.valueAsNumber;
  }
  const schema = byId("schema").value.trim();
  if (schema) body.response_format = responseFormat(parsed(schema, "The JSON schema"));
  const tools = byId("tools").value.trim();
  if (tools) body.tools = parsed(tools, "The list of tools");
  return body;
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

/** Add one event of the stream to the message and its report. */
function take(event, message, report) {
  report.usage = event.usage ?? report.usage;
  report.times = event.times ?? report.times;
  report.explanation = event.cache_explanation ?? event.usage?.cache_explanation ?? report.explanation;
  const choice = event.choices?.[0];
  if (!choice) return;
  report.finish = choice.finish_reason ?? report.finish;
  message.content += choice.delta?.content ?? "";
  message.reasoning_content += choice.delta?.reasoning_content ?? "";
  for (const delta of choice.delta?.tool_calls ?? []) {
    const call = (message.tool_calls[delta.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    call.id ||= delta.id ?? "";
    call.function.name += delta.function?.name ?? "";
    call.function.arguments += delta.function?.arguments ?? "";
  }
}

/** @param {HTMLElement} entry @param {any} message so far */
function draw(entry, message) {
  const messages = byId("messages");
  const follows = messages.scrollHeight - messages.scrollTop - messages.clientHeight < 60;
  entry.querySelector(".text").textContent = message.content;
  if (message.reasoning_content) {
    let reasoning = entry.querySelector(".reasoning");
    if (!reasoning) {
      reasoning = element("details", { class: "reasoning", open: true }, element("summary", { text: "Reasoning" }), element("div", {}));
      entry.querySelector(".text").before(reasoning);
    }
    reasoning.lastElementChild.textContent = message.reasoning_content;
  }
  message.tool_calls.forEach((call, index) => {
    let shown = entry.querySelectorAll(".call")[index];
    if (!shown) entry.append((shown = element("pre", { class: "call", tabindex: "0" })));
    shown.textContent = `${call.function.name}(${call.function.arguments})`;
  });
  if (follows) messages.scrollTop = messages.scrollHeight;
}

// ------------------------------------------------------------ its report

/** The ends of answers that are shown; finish reasons, and the client's own. */
const ENDS = { length: "cut off: no more tokens allowed", tool_calls: "calls a tool", abort: "aborted by the server", stopped: "stopped" };

/** Tokens, speed, and the bar of the prompt. */
function footer(report) {
  const facts = [];
  const { usage, times } = report;
  if (usage) {
    facts.push(`${count(usage.completion_tokens)} tokens`);
    const decode_s = times ? times.total_s - times.queued_s - times.prefill_s : (performance.now() - report.first) / 1e3;
    if (usage.completion_tokens > 1 && decode_s > 0) facts.push(`${((usage.completion_tokens - 1) / decode_s).toFixed(1)} tokens/s`);
  }
  if (report.first) facts.push(`first token after ${duration((report.first - report.began) / 1e3)}`);
  if (report.finish && report.finish !== "stop") facts.push(ENDS[report.finish] ?? report.finish);
  return element("footer", {}, element("p", { class: "facts", text: facts.join(" · ") }), usage && promptBar(usage, report.explanation));
}

/** The prompt as a bar of three parts: from the cache, computed and kept, computed only. */
function promptBar(usage, explanation) {
  const total = usage.prompt_tokens;
  const { cached_tokens: cached = 0, cache_write_tokens: written = 0 } = usage.prompt_tokens_details ?? {};
  const parts = [["cached", cached, "from the cache"], ["written", written, "computed and kept"],
    ["rest", Math.max(0, total - cached - written), "computed"]];
  const bar = element("div", { class: "prompt-bar", "aria-hidden": "true" });
  const legend = element("p", { class: "legend" }, element("span", { text: `Prompt of ${count(total)} tokens, ${percent(cached / total)} cached:` }));
  for (const [name, tokens, text] of parts) {
    if (!tokens) continue;
    const part = element("span", { class: name, title: `${count(tokens)} tokens ${text}` });
    part.style.flexGrow = String(tokens);
    bar.append(part);
    legend.append(element("span", { class: `swatch ${name}`, text: `${count(tokens)} ${text}` }));
  }
  return element("div", { class: "prompt" }, bar, legend, explanation && whyNot(explanation));
}

/**
 * Why the rest of a prompt was not in the cache, as the server explains it.
 * @param {{cause: string, detail: string, divergence: {token_index: number, message_index: number|null, role: string|null,
 *          prompt_text: string|null, cached_text: string|null}|null}} explanation
 */
function whyNot({ cause, detail, divergence }) {
  if (cause === "none") return null;
  const side = (name, text) => text !== null && element("div", {}, element("h3", { text: name }), element("pre", { tabindex: "0", text: text || "(it ends here)" }));
  const place = divergence && `Token ${count(divergence.token_index)}${divergence.role ? `, in message ${divergence.message_index} (${divergence.role})` : ""}`;
  return element("div", { class: `why ${cause}` },
    element("p", {}, element("strong", { text: cause.replaceAll("_", " ") }), `: ${detail}`),
    divergence && element("details", {}, element("summary", { text: place }),
      element("div", { class: "sides" }, side("This prompt", divergence.prompt_text), side("In the cache", divergence.cached_text))));
}

// ------------------------------------------------------------ verdicts

/** @param {HTMLElement} place @param {string} kind "good", "bad", "warning" or "" @param {...(Node|string)} content */
function verdict(place, kind, ...content) {
  place.className = `verdict ${kind}`;
  place.replaceChildren(...content);
}

async function checkSchema() {
  const place = byId("schema-verdict");
  const text = byId("schema").value.trim();
  if (!text) return verdict(place, "");
  let shown;
  try {
    const report = await json("/v1/grammar/compile", { body: { response_format: responseFormat(parsed(text, "This")) } });
    shown = [report.exact && !report.slow.length ? "good" : "warning", ...reportOf(report)];
  } catch (error) {
    shown = ["bad", error.message, error.details?.advice ? element("p", { class: "hint", text: error.details.advice }) : ""];
  }
  if (text === byId("schema").value.trim()) verdict(place, ...shown);
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
  const text = byId("tools").value.trim();
  if (!text) return verdict(place, "");
  try {
    const tools = parsed(text, "This");
    const names = tools.map((tool) => tool.function.name);
    verdict(place, "good", `${names.length === 1 ? "One tool" : `${names.length} tools`}: ${names.join(", ")}.`);
  } catch (error) {
    verdict(place, "bad", error instanceof ServerError ? error.message : 'A list of {"type": "function", "function": {"name": …}} is needed.');
  }
}
