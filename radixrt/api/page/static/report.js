/** What is known of an answer beside its text: tokens, speed, the part of its prompt that came from the cache, and why not all of it. */

import { count, duration, element, percent } from "./dom.js";

/**
 * @typedef {{usage?: any, times?: any, explanation?: any, finish?: string, log_kept?: number, first_s?: number, decode_s?: number}} Report
 *   `log_kept`: sum over the tokens of the logarithm of the probability that a schema left; `first_s`, `decode_s`: by the clock of this page
 */

/** The ends of answers that are shown; finish reasons, and the client's own. */
const ENDS = { length: "cut off: no more tokens allowed", tool_calls: "calls a tool", abort: "aborted by the server", stopped: "stopped" };

/** Causes of misses that nobody can avoid: new text, and the rest of a page. */
const UNAVOIDABLE = ["none", "never_seen", "page_rounding"];

/** Take what an event of the stream says. @param {Report} report @param {any} event */
export function takeReport(report, event) {
  report.usage = event.usage ?? report.usage;
  report.times = event.times ?? report.times;
  report.explanation = event.cache_explanation ?? report.explanation;
  report.finish = event.choices?.[0]?.finish_reason ?? report.finish;
  report.log_kept = event.choices?.[0]?.constraint?.log_kept_mass ?? report.log_kept;
}

/** A line of facts that unfolds; a miss that could be avoided stands below it. @param {Report} report */
export function reportFooter(report) {
  const { usage, explanation } = report;
  const found = factsOf(report);
  if (found.length === 0) return null;
  const facts = element("span", { class: "facts", text: found.join(" · ") });
  if (!usage) return element("footer", {}, facts);
  const avoidable = explanation && !UNAVOIDABLE.includes(explanation.cause);
  return element("footer", {},
    element("details", {}, element("summary", {}, facts), promptBar(usage),
      explanation && !avoidable && explanation.cause !== "none" && element("p", { text: explanation.detail })),
    avoidable && miss(explanation));
}

/** @param {Report} report @returns {string[]} */
function factsOf({ usage, times, finish, log_kept, first_s, decode_s }) {
  const facts = [];
  if (usage) {
    facts.push(`${count(usage.completion_tokens)} tokens`);
    const seconds = times ? times.total_s - times.queued_s - times.prefill_s : decode_s;
    if (usage.completion_tokens > 1 && seconds > 0) facts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s`);
  }
  if (first_s) facts.push(`first token after ${duration(first_s)}`);
  if (usage) facts.push(`${count(usage.prompt_tokens_details?.cached_tokens ?? 0)} of ${count(usage.prompt_tokens)} prompt tokens from the cache`);
  if (usage && log_kept !== undefined) facts.push(`the schema kept ${percent(Math.exp(log_kept / Math.max(1, usage.completion_tokens)))} of the probability`);
  if (finish && finish !== "stop") facts.push(ENDS[finish] ?? finish);
  return facts;
}

/** The prompt as a bar of its parts. */
function promptBar(usage) {
  const total = usage.prompt_tokens;
  const { cached_tokens: cached = 0, cache_write_tokens: written = 0, disk_tokens: disk = 0 } = usage.prompt_tokens_details ?? {};
  const parts = [["cached", cached - disk, "from the cache"], ["disk", disk, "from the cache on disk"], ["written", written, "computed, and in the cache from now on"],
    ["rest", Math.max(0, total - cached - written), "computed for this answer only"]];
  const bar = element("div", { class: "prompt-bar", "aria-hidden": "true" });
  const legend = element("p", { class: "legend" }, element("span", { text: `Prompt: ${percent(cached / total)} cached:` }));
  for (const [name, tokens, text] of parts) {
    if (!tokens) continue;
    const part = element("span", { class: name, title: `${count(tokens)} tokens ${text}` });
    part.style.flexGrow = String(tokens);
    bar.append(part);
    legend.append(element("span", { class: `swatch ${name}`, text: `${count(tokens)} ${text}` }));
  }
  return element("div", { class: "prompt" }, bar, legend);
}

/**
 * Why a part of a prompt was not in the cache, as the server explains it.
 * @param {{cause: string, detail: string, divergence: {token_index: number, message_index: number|null, role: string|null,
 *          prompt_text: string|null, cached_text: string|null}|null}} explanation
 */
function miss({ cause, detail, divergence }) {
  const side = (name, text) => text !== null && element("div", {}, element("h3", { text: name }), element("pre", { tabindex: "0", text: text || "(it ends here)" }));
  return element("div", { class: `why ${cause}` },
    element("p", {}, element("strong", { text: cause.replaceAll("_", " ") }), `: ${detail}`),
    divergence && element("details", {}, element("summary", { text: placeOf(divergence) }),
      element("div", { class: "sides" }, side("This prompt", divergence.prompt_text), side("In the cache", divergence.cached_text))));
}

function placeOf({ token_index, message_index, role }) {
  const place = !role ? "" : role === "system" ? " in the system prompt" : ` in message ${message_index + 1} (${role})`;
  return `The difference begins after ${count(token_index)} tokens${place}`;
}
