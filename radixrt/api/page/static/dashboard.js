/** The dashboard: counters of the server as charts of the last minutes. */

import { Chart } from "./chart.js";
import { byId, count, duration, element, percent } from "./dom.js";
import { onReading } from "./live.js";

/** @typedef {import("./live.js").Reading} Reading */

/** Steps of the engine at the last reading. */
let steps = 0;

const perSecond = (value) => `${count(value)}/s`;
const quantiles = [{ name: "p50", style: "s1" }, { name: "p90", style: "s2" }, { name: "p99", style: "s3" }];

/** Titles and names are those of the Grafana dashboard (deploy/monitoring/dashboard.py). */
const charts = {
  tokens: new Chart("Tokens per second", [
    { name: "generated", style: "s1" }, { name: "prompts, from the cache", style: "s2" }, { name: "prompts, computed", style: "s3" }], perSecond, { logarithmic: true }),
  hits: new Chart("Cached share of prompts", [{ name: "hit rate", style: "s2" }], percent, { top: 1 }),
  ttft: new Chart("Time to first token", quantiles, duration),
  itl: new Chart("Time between tokens", quantiles, duration),
  requests: new Chart("Requests", [{ name: "running", style: "s1" }, { name: "waiting", style: "s3" }], count, { least: 2 }),
  pool: new Chart("KV pool", [
    { name: "owned", style: "s4" }, { name: "locked", style: "s3" }, { name: "pinned", style: "s5" }, { name: "evictable", style: "s2" }],
  count, { stacked: true }),
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
  if (reading.engine.stats.steps < steps) for (const chart of Object.values(charts)) chart.clear(); // the engine was restarted
  steps = reading.engine.stats.steps;
  showTiles(reading);
  draw(reading);
}

/** @param {Reading} reading */
function draw({ time_s, engine: { stats, cache, pool, rates } }) {
  charts.tokens.add(time_s, [rates.generated_tokens_per_s, rates.cached_tokens_per_s, rates.computed_tokens_per_s]);
  charts.hits.add(time_s, [rates.hit_rate]);
  for (const name of ["ttft", "itl"]) charts[name].add(time_s, quantiles.map((quantile) => rates[name]?.[quantile.name] ?? null));
  charts.requests.add(time_s, [stats.running, stats.waiting]);
  charts.pool.top = cache.tokens.total;
  charts.pool.add(time_s, [pool.owned, pool.locked, pool.pinned, pool.evictable]);
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
    ...(cache.kept_states ? [statesTile(cache)] : []),
  ]);
}

/** The states of recurrent layers. */
function statesTile({ kept_states, kept_state_bytes, stateless_tokens, prompt_tokens }) {
  const again = percent(stateless_tokens / Math.max(1, prompt_tokens));
  return ["States kept", count(kept_states), `${count(kept_state_bytes / 2 ** 20)} MiB; ${again} of prompt tokens computed again for lack of one`];
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
