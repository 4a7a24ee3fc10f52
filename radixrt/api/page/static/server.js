/** Requests to the server that this page comes from, with the key of this tab. */

const KEY = "radixrt-key";

/** The key of this tab; "": none. */
export const key = () => sessionStorage.getItem(KEY) ?? "";

/** @param {string} value "" forgets the key */
export function keepKey(value) {
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
  for (const listener of keyListeners) listener();
}

/** @type {(() => void)[]} called when the key has changed */
export const keyListeners = [];

/** An error from the server. */
export class ServerError extends Error {
  /** @param {number} status @param {string} message @param {any} [details] the whole error object */
  constructor(status, message, details = null) {
    super(message);
    this.status = status;
    this.details = details;
  }
}

/**
 * @param {string} path
 * @param {{body?: any, signal?: AbortSignal, headers?: Object<string, string>}} [options] with a body it is a POST
 * @returns {Promise<Response>}
 * @throws {ServerError}
 */
export async function send(path, { body, signal, headers = {} } = {}) {
  if (key()) headers = { ...headers, authorization: `Bearer ${key()}` };
  const init = { headers: { accept: "application/json", ...headers }, signal, cache: "no-store", credentials: "omit" };
  if (body !== undefined) {
    init.headers["content-type"] = "application/json";
    Object.assign(init, { method: "POST", body: JSON.stringify(body) });
  }
  let response;
  try {
    response = await fetch(path, init);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, "The server does not answer.");
  }
  if (response.ok) return response;
  const found = (await response.json().catch(() => null))?.error;
  throw new ServerError(response.status, found?.message ?? `The server answered with status ${response.status}.`, found);
}

/** The JSON of a response. @param {string} path @param {any} [options] as of {@link send} */
export const json = async (path, options) => (await send(path, options)).json();

/**
 * The data of each server-sent event of a response, parsed; ends at "[DONE]".
 * @param {Response} response
 * @returns {AsyncGenerator<any>}
 * @throws {ServerError} an event tells an error
 */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const data = block.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
        if (data === "[DONE]") return;
        if (!data) continue;
        const event = JSON.parse(data);
        if (event.error) throw new ServerError(500, event.error.message, event.error);
        yield event;
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
