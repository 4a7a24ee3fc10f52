/** Streams an answer into its message. */

import { takeReport } from "./report.js";
import { events, send } from "./server.js";

/**
 * @param {string} path of the API
 * @param {any} body of the request
 * @param {import("./conversation.js").Message} message is filled
 * @param {AbortSignal} signal
 * @param {{grow: () => void, showProgress: (progress: any) => void}} view is told of what comes
 */
export async function streamAnswer(path, body, message, signal, view) {
  const began = performance.now();
  const report = (message.report = { finish: "" });
  let first = 0;
  try {
    const response = await send(path, {
      body: { ...body, stream: true, stream_options: { include_usage: true }, return_times: true, return_progress: true },
      signal,
      headers: { "x-radixrt-explain-cache": "1" },
    });
    for await (const event of events(response)) {
      takeReport(report, event);
      if (event.prompt_progress) view.showProgress(event.prompt_progress);
      else {
        first ||= performance.now();
        takeText(message, event);
        view.grow();
      }
    }
  } catch (error) {
    if (error.name === "AbortError") report.finish = "stopped";
    else Object.assign(message, { error: error.message, errorCode: error.details?.code });
  }
  if (first) Object.assign(report, { first_s: (first - began) / 1e3, decode_s: (performance.now() - first) / 1e3 });
}

/** Add the text of an event. */
function takeText(message, event) {
  const choice = event.choices?.[0];
  if (!choice) return;
  message.content += choice.text ?? choice.delta?.content ?? "";
  if (choice.delta?.reasoning_content) message.reasoning = (message.reasoning ?? "") + choice.delta.reasoning_content;
  for (const delta of choice.delta?.tool_calls ?? []) {
    const call = ((message.tool_calls ??= [])[delta.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    call.id ||= delta.id ?? "";
    call.function.name += delta.function?.name ?? "";
    call.function.arguments += delta.function?.arguments ?? "";
  }
}
