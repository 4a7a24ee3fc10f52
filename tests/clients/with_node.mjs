// Clients in JavaScript: `node with_node.mjs URL CHECK`, in a folder with their packages. A check is as in with_python.py.
import assert from "node:assert";

const MODEL = "tiny", LIMIT = 300, QUESTION = "How is the weather in Oslo?";
const [url, check] = process.argv.slice(2);
const settings = { baseURL: `${url}/v1`, apiKey: "none" };

async function openaiNode() {
  const { default: OpenAI } = await import("openai");
  const client = new OpenAI(settings);
  const messages = [{ role: "user", content: QUESTION }];
  const answer = await client.chat.completions.create({ model: MODEL, messages, max_tokens: LIMIT });
  assert(answer.usage.completion_tokens > 0);
  const response = await client.responses.create({ model: MODEL, input: QUESTION, max_output_tokens: LIMIT });
  assert(response.usage.output_tokens > 0);
  const events = [];
  const stream = client.responses.stream({ model: MODEL, input: QUESTION, max_output_tokens: LIMIT });
  for await (const event of stream) events.push(event.type);
  assert.equal(events[0], "response.created");
  assert.equal((await stream.finalResponse()).object, "response");
}

async function vercel() {
  const { createOpenAI } = await import("@ai-sdk/openai");
  const { generateText, streamText, tool, Output } = await import("ai");
  const { z } = await import("zod");
  const provider = createOpenAI(settings);
  for (const model of [provider(MODEL), provider.chat(MODEL)]) {
    const asked = { model, prompt: QUESTION, maxOutputTokens: LIMIT };
    assert((await generateText(asked)).usage.outputTokens > 0);
    const stream = streamText(asked);
    for await (const part of stream.fullStream) assert.notEqual(part.type, "error", String(part.error));
    assert((await stream.usage).outputTokens > 0);
    const inputSchema = z.object({ unit: z.enum(["C", "F"]) });
    const tools = { weather: tool({ inputSchema, execute: async () => "rain" }) };
    const called = await generateText({ ...asked, tools, toolChoice: "required" });
    assert.equal(called.toolCalls[0].toolName, "weather");
    const output = Output.object({ schema: z.object({ unit: z.enum(["C", "F"]) }) });
    assert((await generateText({ ...asked, output })).output.unit);
  }
}

const checks = { "openai-node": openaiNode, "Vercel AI SDK": vercel };
if (url === undefined) console.log(Object.keys(checks).join("\n"));
else await checks[check]();
