// Tests the official JavaScript client of OpenAI's API with the server on models/moesaic-tiny.
import assert from "node:assert/strict";
import test from "node:test";
import OpenAI from "openai";

const MODEL = "moesaic-tiny";
const url = process.env.MOESAIC_URL;
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "-", maxRetries: 0 });
const ask = (content, more = {}, options = {}) =>
  client.chat.completions.create({ model: MODEL, messages: [{ role: "user", content }], ...more }, options);
const WEATHER = {
  name: "get_weather", description: "Weather of a city",
  parameters: { type: "object", properties: { city: { type: "string", maxLength: 12 } }, required: ["city"] },
};
const PERSON = {
  type: "object", additionalProperties: false, required: ["name", "age"],
  properties: { name: { type: "string", maxLength: 12 }, age: { type: "integer", minimum: 0, maximum: 99 } },
};

async function metric(name, label = "") {
  const text = await (await fetch(`${url}/metrics`)).text();
  return text.split("\n").filter((line) => line.startsWith(`${name}{`) && line.includes(label))
    .reduce((sum, line) => sum + Number(line.split(" ").at(-1)), 0);
}

async function untilQuiet() {
  for (let i = 0; i < 2400; ++i) {
    if (await metric("vllm:num_requests_running") === 0 && await metric("vllm:kv_cache_usage_perc") === 0) return;
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  assert.fail("a request that its client left still runs");
}

test("chat answers, and streams the same", async () => {
  const whole = await ask("What is the capital of France?", { temperature: 0 });
  assert.match(whole.choices[0].message.content, /Paris/);
  assert.equal(whole.choices[0].finish_reason, "stop");
  const stream = await ask("What is the capital of France?", { temperature: 0, stream: true, stream_options: { include_usage: true } });
  let text = "", usage = null, chunks = 0;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
    ++chunks;
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
  assert.ok(chunks > 5);
});

test("the stream helper gathers the text of the answer", async () => {
  const events = [];
  const runner = client.chat.completions.stream({ model: MODEL, temperature: 0, messages: [{ role: "user", content: "What is 2 plus 3?" }] })
    .on("content", (delta) => events.push(delta));
  const final = await runner.finalChatCompletion();
  assert.equal(events.join(""), final.choices[0].message.content);
  assert.match(final.choices[0].message.content, /5/);
});

test("tools are called, whole and streamed", async () => {
  const fields = {
    tools: [{ type: "function", function: WEATHER }], temperature: 0, max_tokens: 60,
    tool_choice: { type: "function", function: { name: "get_weather" } },
  };
  const whole = await ask("Hello", fields);
  const call = whole.choices[0].message.tool_calls[0];
  assert.equal(call.function.name, "get_weather");
  assert.equal(typeof JSON.parse(call.function.arguments).city, "string");
  const runner = client.chat.completions.stream({ model: MODEL, messages: [{ role: "user", content: "Hello" }], ...fields });
  const streamed = (await runner.finalChatCompletion()).choices[0].message.tool_calls[0];
  assert.deepEqual(streamed.function.arguments, call.function.arguments);
});

test("tools run through the client's loop", async () => {
  const asked = [];
  const runner = client.chat.completions.runTools({
    model: MODEL, temperature: 0, max_tokens: 60, messages: [{ role: "user", content: "What's the weather like in Geneva?" }],
    tools: [{
      type: "function",
      function: { ...WEATHER, parse: JSON.parse, function: ({ city }) => { asked.push(city); return "sunny"; } },
    }],
  }, { maxChatCompletions: 3 });
  await runner.done();
  assert.deepEqual(asked, ["Geneva"]);
  assert.ok(runner.messages.some((message) => message.role === "tool" && message.content === "sunny"));
});

test("JSON follows its schema", async () => {
  const answer = await ask("Tell me a story.", {
    max_tokens: 80, seed: 1, response_format: { type: "json_schema", json_schema: { name: "person", schema: PERSON, strict: true } },
  });
  const person = JSON.parse(answer.choices[0].message.content);
  assert.deepEqual(Object.keys(person).sort(), ["age", "name"]);
  assert.ok(Number.isInteger(person.age));
});

test("logprobs and token ids come with the text", async () => {
  const answer = await ask("Hello", { max_tokens: 6, temperature: 0, logprobs: true, top_logprobs: 2, return_token_ids: true });
  const { content } = answer.choices[0].logprobs;
  assert.equal(content.length, answer.usage.completion_tokens);
  assert.ok(content.every((token) => token.logprob <= 0 && token.top_logprobs.length === 2));
  assert.equal(answer.choices[0].token_ids.length, answer.usage.completion_tokens);
  assert.equal(answer.prompt_token_ids.length, answer.usage.prompt_tokens);
});

test("completions take text and token ids", async () => {
  const text = await client.completions.create({ model: MODEL, prompt: "Hello there", max_tokens: 6, temperature: 0 });
  const { tokens } = await (await fetch(`${url}/tokenize`, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ prompt: "Hello there" }) })).json();
  const ids = await client.completions.create({ model: MODEL, prompt: tokens, max_tokens: 6, temperature: 0 });
  assert.equal(ids.choices[0].text, text.choices[0].text);
});

test("responses answer, stream, and are kept", async () => {
  const whole = await client.responses.create({ model: MODEL, input: "What is the capital of France?", temperature: 0 });
  assert.match(whole.output_text, /Paris/);
  let text = "";
  const stream = await client.responses.create({ model: MODEL, input: "What is the capital of France?", temperature: 0, stream: true });
  for await (const event of stream) if (event.type === "response.output_text.delta") text += event.delta;
  assert.equal(text, whole.output_text);
  assert.equal((await client.responses.retrieve(whole.id)).output_text, whole.output_text);
  const next = await client.responses.create({ model: MODEL, input: "And of Italy?", previous_response_id: whole.id, temperature: 0, max_output_tokens: 30 });
  assert.equal(next.previous_response_id, whole.id);
  assert.ok(next.usage.input_tokens > whole.usage.input_tokens);
  await client.responses.delete(whole.id);
  await assert.rejects(client.responses.retrieve(whole.id), OpenAI.NotFoundError);
});

test("models are listed and embeddings are normalized", async () => {
  assert.deepEqual((await client.models.list()).data.map((model) => model.id), [MODEL]);
  const { data } = await client.embeddings.create({ model: MODEL, input: ["cat", "dog"] });
  assert.equal(data.length, 2);
  assert.ok(Math.abs(data[0].embedding.reduce((sum, x) => sum + x * x, 0) - 1) < 1e-3);
});

test("a client that leaves ends its request", async () => {
  const stream = await ask("Tell me a story.", { stream: true, n: 64, max_tokens: 3500, ignore_eos: true });
  let chunks = 0;
  for await (const _ of stream) if (++chunks === 5) break;  // leaving the loop closes the connection
  await untilQuiet();
  const aborted = () => metric("vllm:request_success_total", 'finished_reason="abort"');
  const before = await aborted();
  const controller = new AbortController();
  const another = await ask(
    "Tell me a story.", { stream: true, n: 64, max_tokens: 3500, ignore_eos: true }, { signal: controller.signal });
  for await (const _ of another) controller.abort();  // at the first chunk
  await untilQuiet();
  assert.ok(await aborted() > before);
});

test("errors are of the client's own classes", async () => {
  await assert.rejects(ask("Hello", { temperature: -1 }), (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature");
  await assert.rejects(ask("Hello", { model: "other" }), OpenAI.NotFoundError);
  await assert.rejects(ask("word ".repeat(5000)), (error) => error.code === "context_length_exceeded");
});
