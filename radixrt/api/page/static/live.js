/** The readings of the server, once a second, for all views that show them. */

import { events, key, keyListeners, send } from "./server.js";

/**
 * @typedef {{stats: Object<string, number>, cache: any, pool: Object<string, number>, rates: Object<string, any>}} Engine
 * @typedef {{time_s: number, model: string, device: string, kv_bytes_per_token: number, is_admin: boolean,
 *            engine?: Engine, own?: Object<string, number>, tree: any}} Reading
 */

/** What a stream shows of the tree: little while no view shows it. */
const NO_TREE = { depth: 1, nodes: 1 };
const LONGEST_PAUSE_MS = 15_000;

/** @type {((reading: Reading) => void)[]} */
const listeners = [];
/** @type {((error: Error|null) => void)[]} */
const stateListeners = [];
let view = NO_TREE;
/** @type {AbortController|null} */
let stream = null;
let attempts = 0;
let timer = 0;

/** @param {(reading: Reading) => void} listener called for each reading */
export const onReading = (listener) => listeners.push(listener);

/** @param {(error: Error|null) => void} listener called with null when readings come, and with an error when they have ended */
export const onState = (listener) => stateListeners.push(listener);

/** @param {{below?: number|null}|null} wanted the tree below a node, or all of it; null: no tree */
export function showTree(wanted) {
  const next = wanted === null ? NO_TREE : wanted.below == null ? {} : { below: wanted.below };
  if (JSON.stringify(next) === JSON.stringify(view)) return;
  view = next;
  connect();
}

export function startLive() {
  document.addEventListener("visibilitychange", () => (document.hidden ? disconnect() : connect()));
  keyListeners.push(() => {
    attempts = 0;
    connect();
  });
  connect();
}

function disconnect() {
  clearTimeout(timer);
  stream?.abort();
  stream = null;
}

async function connect() {
  disconnect();
  if (document.hidden) return;
  const own = (stream = new AbortController());
  let failure = null;
  try {
    const response = await send(`/v1/live?${new URLSearchParams({ stream: "true", ...view })}`, { signal: own.signal });
    for await (const reading of events(response)) {
      if (own.signal.aborted) return;
      attempts = 0;
      for (const tell of stateListeners) tell(null);
      for (const tell of listeners) tell(reading);
    }
  } catch (error) {
    if (own.signal.aborted) return;
    failure = error;
  }
  if (own.signal.aborted) return;
  if (failure) for (const tell of stateListeners) tell(failure);
  if (failure?.status === 401 && !key()) return; // a key is asked for, and connects
  timer = setTimeout(connect, failure ? Math.min(LONGEST_PAUSE_MS, 500 * 2 ** attempts++) : 0);
}
