/** The dashboard: counters of the server as charts of the last minutes. */

import { Chart } from "./chart.js";
import { byId, count, duration, element, percent } from "./dom.js";
import { onReading } from "./live.js";

const RATE_S = 5;
const LATENCY_S = 15;

/** @typedef {import("./live.js").Reading} Reading */

/** @type {Reading[]} of the last seconds, the oldest first */
let recent = [];

const perSecond = (value) => `${count(value)}/s`;

const charts = {
  throughput: new Chart("Tokens", [
    { name: "generated", style: "s1" }, { name: "prompt, from the cache", style: "s2" }, { name: "prompt, computed", style: "s3" }], perSecond),
  hits: new Chart("Hit rate", [{ name: "of the prompt tokens", style: "s2" }], percent, { top: 1 }),
  ttft: new Chart("Time to first token", [{ name: "median", style: "s1" }, { name: "95 %", style: "s3" }], duration),
  itl: new Chart("Inter-token latency", [{ name: "median", style: "s1" }, { name: "95 %", style: "s3" }], duration),
  queue: new Chart("Requests", [{ name: "running", style: "s1" }, { name: "waiting", style: "s3" }], count, { least: 2 }),
  pool: new Chart("KV pool", [
    { name: "running", style: "s4" }, { name: "shared and running", style: "s3" }, { name: "pinned", style: "s5" },
    { name: "cached", style: "s2" }], count, { stacked: true }),
};

export function startDashboard() {
  byId("charts").append(...Object.values(charts).map((chart) => chart.root));
  onReading(take);
}

/** @param {Reading} reading */
function take(reading) {
  byId("no-counters").hidden = Boolean(reading.engine);
  byId("charts").hidden = !reading.engine;
  if (!reading.engine) return showOwn(reading);
  const last = recent.at(-1);
  if (last && reading.engine.stats.steps < last.engine.stats.steps) {
    recent = []; // the engine was restarted
    for (const chart of Object.values(charts)) chart.clear();
  }
  recent.push(reading);
  while (recent.length > 2 && recent[1].time_s <= reading.time_s - LATENCY_S) recent.shift();
  showTiles(reading);
  draw(reading);
}

/** The newest of the kept readings that is at least this old, or the oldest. @param {number} seconds */
const before = (seconds) => recent.findLast((one) => one.time_s <= recent.at(-1).time_s - seconds + 0.05) ?? recent[0];

/** @param {Reading} reading */
function draw(reading) {
  const { stats, requests, cache } = reading.engine;
  const time = reading.time_s;
  const past = before(RATE_S);
  const seconds = time - past.time_s;
  const grown = (name) => stats[name] - past.engine.stats[name];
  if (seconds > 0) {
    const [prompt, cached] = [grown("prompt_tokens"), grown("cached_tokens")];
    charts.throughput.add(time, [grown("output_tokens") / seconds, cached / seconds, (prompt - cached) / seconds]);
    charts.hits.add(time, [prompt ? cached / prompt : null]);
  }
  const older = before(LATENCY_S).engine.requests;
  for (const name of ["ttft", "itl"]) charts[name].add(time, [0.5, 0.95].map((share) => quantile(requests[name], older[name], share)));
  charts.queue.add(time, [stats.running, stats.waiting]);
  const held = cache.tokens.cached - cache.tokens.evictable;
  const pinned = Math.min(held, cache.tokens.pinned);
  charts.pool.top = cache.tokens.total;
  charts.pool.add(time, [cache.tokens.owned, held - pinned, pinned, cache.tokens.evictable]);
}

/**
 * A quantile of what a histogram has got since an older one, interpolated within its bucket; null: it has got nothing.
 * @param {import("./live.js").Histogram} now @param {import("./live.js").Histogram} older @param {number} share
 */
export function quantile(now, older, share) {
  const counts = now.counts.map((value, index) => value - older.counts[index]);
  const total = counts.reduce((sum, value) => sum + value, 0);
  if (!total) return null;
  let left = share * total;
  for (let index = 0; index < now.bounds.length; index++) {
    const low = now.bounds[index - 1] ?? 0;
    if (counts[index] >= left) return low + (now.bounds[index] - low) * (left / counts[index]);
    left -= counts[index];
  }
  return now.bounds.at(-1);
}

/** @param {Reading} reading */
function showTiles({ engine: { stats, cache }, device, kv_bytes_per_token }) {
  const mebibytes = (cache.tokens.total * kv_bytes_per_token) / 2 ** 20;
  showAll([
    ["Running", count(stats.running)],
    ["Waiting", count(stats.waiting)],
    ["Hit rate since start", percent(cache.hit_rate)],
    ["KV pool in use", percent(1 - cache.pages.free / cache.pages.total), `${count(cache.tokens.total)} tokens, ${count(mebibytes)} MiB on ${device}`],
    ["Generated", count(stats.output_tokens), "tokens since start"],
    ["Evicted", count(cache.evicted_tokens), "tokens since start"],
    ["Leases", count(cache.leases), cache.leases_broken ? `${count(cache.leases_broken)} broken` : ""],
    ["Nodes of the tree", count(cache.tree_nodes)],
  ]);
}

/** A user sees the counters of its key. @param {Reading} reading */
function showOwn({ own }) {
  if (!own) return showAll([]);
  showAll([
    ["Hit rate of this key", percent(own.hit_rate)],
    ["Prompt tokens", count(own.prompt_tokens)],
    ["From the cache", count(own.cached_tokens)],
    ["Generated", count(own.output_tokens)],
    ["Leases", count(own.leases), `${count(own.pinned_tokens)} tokens`],
  ]);
}

/** @param {string[][]} tiles name, value, and a note */
function showAll(tiles) {
  byId("tiles").replaceChildren(...tiles.map(([name, value, note]) =>
    element("div", {}, element("dt", { text: name }), element("dd", {}, element("b", { text: value }), note ? element("small", { text: note }) : null))));
}
