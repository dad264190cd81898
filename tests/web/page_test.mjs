// Tests the chat in Chromium on models/moesaic-tiny: answers, branches, tools, keys, settings and reloads.
import assert from "node:assert/strict";
import test from "node:test";
import { CHAT, ON_PHONE, answer, answerWith, answerWithoutEnd, ask, noSidewaysScroll, open, ready, send, set, settled, shot, withPage } from "./browser.mjs";

const WEATHER = [{ type: "function", function: {
  name: "get_weather", description: "Get the weather in a city.",
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }];
const said = (page) => page.locator(".turn .prose").allInnerTexts();

test("a message is sent, its answer streams, and a reload keeps both", () => withPage({}, async (page) => {
  await open(page);
  await page.getByText("What would you like to know?").waitFor();
  await shot(page, "empty");
  await set(page, { temperature: "0" });
  await ask(page, "What is the capital of France?");
  assert.match(await answer(page).innerText(), /Paris/);
  assert.match(await answer(page).locator("footer").innerText(), /tokens.*first token/);
  await answerWithoutEnd(page);
  await page.evaluate(() => {
    window.lengths = new Set();
    new MutationObserver(() => window.lengths.add(document.querySelectorAll(".turn.assistant")[1]?.innerText.length))
      .observe(document.getElementById("thread"), { childList: true, subtree: true, characterData: true });
  });
  await send(page, "Tell me a story.");
  await page.waitForFunction(() => window.lengths.size > 3); // the text arrives in pieces
  await page.click("#stop");
  await settled(page);
  const before = await said(page);
  await page.reload();
  await ready(page);
  assert.deepEqual(await said(page), before);
}));

test("a click on an example sends it with the model's sampling defaults", () => withPage({}, async (page) => {
  await open(page);
  const bodies = await answerWith(page, () => [{ content: "ok" }]);
  const example = page.locator(".examples button").first();
  const text = await example.innerText();
  await example.click();
  await page.locator(".turn.assistant").waitFor();
  await settled(page);
  assert.deepEqual(bodies[0].messages, [{ role: "user", content: text }]);
  for (const field of ["temperature", "top_p", "system", "tools"]) assert.ok(!(field in bodies[0]), field);
}));

test("an answer is stopped, its request too, and regenerated as a second version", () => withPage({}, async (page) => {
  await open(page);
  const { left } = await answerWithoutEnd(page);
  await send(page, "Tell me a story.");
  await page.locator(".turn.assistant.pending .prose").filter({ hasText: "word1" }).waitFor();
  await page.keyboard.press("Escape");
  await settled(page);
  assert.equal(await answer(page).locator(".mark").innerText(), "Stopped");
  assert.ok(await page.locator("#send").isVisible());
  await left;
  await page.unroute(CHAT);
  await answer(page).getByRole("button", { name: "Regenerate" }).click();
  await answer(page).getByText("2 / 2").waitFor();
  await settled(page);
  assert.equal(await page.locator(".turn").count(), 2);
}));

test("an edited message and a regenerated answer are branches, which a reload keeps", () => withPage({}, async (page) => {
  await open(page);
  await answerWith(page, (body, n) => [{ content: `answer ${n} to ${body.messages.at(-1).content}` }]);
  await ask(page, "one");
  await ask(page, "two");
  await answer(page).getByLabel("Regenerate").click();
  await page.getByText("answer 3 to two").waitFor();
  await page.locator(".turn.user").first().hover();
  await page.locator(".turn.user").first().getByLabel("Edit").click();
  await page.getByLabel("Edited message").fill("uno");
  await shot(page, "edit");
  await page.getByLabel("Edited message").press("Enter");
  await page.getByText("answer 4 to uno").waitFor();
  await settled(page);
  assert.deepEqual(await said(page), ["uno", "answer 4 to uno"]);
  await page.getByLabel("Previous version").first().click();
  await page.getByText("answer 3 to two").waitFor();
  assert.deepEqual(await said(page), ["one", "answer 1 to one", "two", "answer 3 to two"]);
  assert.deepEqual(await page.locator(".siblings .count").allInnerTexts(), ["1 / 2", "2 / 2"]);
  await page.getByLabel("Previous version").last().click();
  await page.getByText("answer 2 to two").waitFor();
  await shot(page, "branches");
  await page.reload();
  await ready(page);
  assert.deepEqual(await said(page), ["one", "answer 1 to one", "two", "answer 2 to two"]);
  await page.focus("#prompt");
  await page.keyboard.press("ArrowUp");
  assert.equal(await page.getByLabel("Edited message").inputValue(), "two");
  await page.keyboard.press("Escape");
  assert.deepEqual(await said(page), ["one", "answer 1 to one", "two", "answer 2 to two"]);
}));

test("a reload during an answer keeps its text, and the answer continues after it", () => withPage({}, async (page) => {
  await open(page);
  await answerWithoutEnd(page);
  await send(page, "Tell me a story.");
  await page.locator(".turn.assistant.pending .prose").filter({ hasText: "word12" }).waitFor();
  const seen = (await answer(page).locator(".prose").innerText()).trim();
  await page.reload();
  await ready(page);
  assert.equal(await answer(page).locator(".mark").innerText(), "Interrupted");
  const kept = (await answer(page).locator(".prose").innerText()).trim();
  assert.ok(kept.startsWith(seen), `kept "${kept}" of "${seen}"`);
  await shot(page, "interrupted");
  const bodies = await answerWith(page, () => [{ content: " and the end." }]);
  await answer(page).getByText("Continue").click();
  await page.getByText("and the end.").waitFor();
  await settled(page);
  assert.equal(bodies[0].continue_final_message, true);
  assert.equal(bodies[0].messages.at(-1).role, "assistant");
  assert.ok((await answer(page).locator(".prose").innerText()).startsWith(kept.slice(0, 20)));
  assert.equal(await answer(page).locator(".mark").isVisible(), false);
  assert.equal(await page.locator(".turn").count(), 2);
  await page.reload();
  await ready(page);
  assert.match(await answer(page).innerText(), /and the end\./);
}));

test("the server itself continues an answer that was cut at the token limit", () => withPage({}, async (page) => {
  await open(page);
  await set(page, { temperature: "0", "max-tokens": "4" });
  await ask(page, "What is the capital of France?");
  const begun = (await answer(page).locator(".prose").innerText()).trim();
  await set(page, { "max-tokens": "60" });
  await answer(page).getByText("Continue").click();
  await answer(page).locator(".prose").filter({ hasText: /Paris/ }).waitFor();
  await settled(page);
  assert.ok((await answer(page).locator(".prose").innerText()).startsWith(begun));
}));

test("an answer that its deadline ends can be continued", () => withPage({}, async (page) => {
  await open(page);
  await answerWith(page, () => [{ content: "Half an" }], "deadline");
  await ask(page, "Hello");
  assert.match(await answer(page).locator("footer").innerText(), /cut at the server's time limit/);
  await answerWith(page, () => [{ content: " answer." }]);
  await answer(page).getByText("Continue").click();
  await page.getByText("Half an answer.").waitFor();
  await settled(page);
  assert.doesNotMatch(await answer(page).locator("footer").innerText(), /cut at/);
  assert.equal(await answer(page).getByText("Continue").count(), 0);
}));

test("a lost connection keeps the answer and shows an error", () => withPage({}, async (page) => {
  await open(page);
  await page.route(CHAT, (route) => route.fulfill({ contentType: "text/event-stream",
    body: 'data: {"choices":[{"index":0,"delta":{"content":"Half an"}}]}\n\n' }));
  await ask(page, "Hello");
  assert.equal(await answer(page).locator(".prose").innerText(), "Half an");
  assert.equal(await answer(page).locator(".mark").innerText(), "Interrupted");
  assert.match(await answer(page).locator(".fault").innerText(), /connection ended/);
}));

test("a tool call is shown and takes a result, and the model continues with it", () => withPage({}, async (page) => {
  await open(page);
  await set(page, { temperature: "0", tools: JSON.stringify(WEATHER) });
  await ask(page, "What's the weather like in Geneva?");
  const call = page.locator(".call");
  assert.match(await call.locator("header").innerText(), /get_weather/);
  assert.match(await call.locator("pre").innerText(), /"city": "Geneva"/);
  await shot(page, "tools");
  const sent = page.waitForRequest(CHAT);
  await page.getByLabel("Result of get_weather").fill('{"temperature": 21}');
  await page.getByText("Send result").click();
  const { messages } = (await sent).postDataJSON();
  assert.deepEqual(messages.map((message) => message.role), ["user", "assistant", "tool"]);
  assert.equal(messages[2].content, '{"temperature": 21}');
  assert.equal(messages[2].tool_call_id, messages[1].tool_calls[0].id);
  await page.locator(".turn").nth(3).waitFor();
  await settled(page);
  assert.equal(await answer(page).locator(".fault").isVisible(), false);
  assert.match(await page.locator(".call.result").innerText(), /21/);
  await page.locator(".turn.tool").hover();
  await page.locator(".turn.tool").getByLabel("Edit").click();
  await page.getByLabel("Result of get_weather").fill("cold");
  await page.getByLabel("Result of get_weather").press("Enter");
  await page.locator(".turn.tool").getByText("2 / 2").waitFor();
  await settled(page);
  await shot(page, "tool-result");
}));

test("reasoning is shown separately and folds when the answer begins", () => withPage({ colorScheme: "dark" }, async (page) => {
  await open(page);
  await answerWith(page, () => [{ reasoning_content: "First I think.\n" }, { reasoning_content: "Then I know." }, { content: "It is **bold**." }]);
  await ask(page, "Think!");
  const thought = page.locator("details.thought");
  assert.equal(await thought.getAttribute("open"), null);
  await thought.locator("summary").click();
  assert.match(await thought.innerText(), /Then I know/);
  await shot(page, "thoughts-dark");
}));

test("errors are shown where they belong", () => withPage({}, async (page, faults) => {
  await open(page);
  await set(page, { tools: "not JSON" });
  await ask(page, "Hello");
  assert.match(await page.locator(".turn .fault").innerText(), /Tools/);
  await page.click("#open-settings");
  await page.locator("#tools-fault").filter({ hasText: /\w/ }).waitFor();
  await page.keyboard.press("Escape");
  await set(page, { tools: "" });
  await page.route(CHAT, (route) => route.abort());
  await answer(page).getByText("Regenerate").click();
  await page.locator(".turn").getByText("The server does not answer").waitFor();
  await page.route(CHAT, (route) => route.fulfill({ status: 403, contentType: "application/json",
    body: JSON.stringify({ error: { message: "pages of this origin may not use this server", code: "origin_not_allowed" } }) }));
  await answer(page).getByText("Regenerate").click();
  await page.locator(".turn").getByText("pages of this origin").waitFor();
  assert.equal(await page.locator("#settings").isVisible(), false, "no key would help");
  faults.length = 0; // the console reports the failed requests
}));

test("a refused key opens the settings at the key, with the reason", () => withPage({}, async (page, faults) => {
  const refuse = (status, message) => ({ status, contentType: "application/json", body: JSON.stringify({ error: { message } }) });
  const guard = (key, refusal) => (route) => route.request().headers().authorization === `Bearer ${key}` ? route.continue() : route.fulfill(refusal);
  await page.route("**/v1/**", guard("secret", refuse(401, "a valid API key is needed")));
  await page.route("**/state", guard("root", refuse(403, "this needs an admin key")));
  await open(page);
  const reason = page.locator("#key-reason");
  await reason.filter({ hasText: "a valid API key is needed" }).waitFor();
  assert.equal(await page.evaluate(() => document.activeElement.id), "api-key");
  await shot(page, "key");
  await page.keyboard.press("Escape");
  await ask(page, "What is the capital of France?");
  await reason.filter({ hasText: "a valid API key is needed" }).waitFor();
  assert.equal(await page.evaluate(() => document.activeElement.id), "api-key");
  await page.keyboard.type("secret");
  await page.keyboard.press("Enter");
  await page.locator("#model").filter({ hasText: "moesaic-tiny" }).waitFor();
  await answer(page).getByText("Regenerate").click();
  await answer(page).locator(".prose").filter({ hasText: /\w/ }).waitFor();
  await settled(page);
  await page.click("#tab-operations");
  await reason.filter({ hasText: "this needs an admin key" }).waitFor();
  assert.equal(await page.evaluate(() => document.activeElement.id), "admin-key");
  await page.keyboard.press("Escape");
  await page.locator("#state-fault").waitFor();
  await shot(page, "admin-key");
  await page.click("#state-key");
  await page.fill("#admin-key", "root");
  await page.keyboard.press("Enter");
  await page.locator("#blocks-caption").filter({ hasText: /blocks in use/ }).waitFor();
  await page.reload();
  await ready(page);
  await page.locator("#blocks-caption").filter({ hasText: /blocks in use/ }).waitFor();
  faults.splice(0, faults.length, ...faults.filter((fault) => !/status of 40[13]/.test(fault)));
}));

test("a refused /state is requested again only with other keys or when the view is opened again", () => withPage({}, async (page, faults) => {
  let asked = 0;
  let read = 0;
  await page.route("**/state", (route) => {
    ++asked;
    return route.fulfill({ status: 403, contentType: "application/json", body: JSON.stringify({ error: { message: "this needs an admin key" } }) });
  });
  await page.route("**/metrics", (route) => {
    ++read;
    return route.continue();
  });
  const readTwice = async () => {
    const before = read;
    while (read < before + 2) await page.waitForTimeout(100);
  };
  await open(page, "#operations");
  await page.locator("#state-fault").waitFor({ state: "attached" });
  await readTwice();
  assert.equal(asked, 1);
  await page.fill("#admin-key", "other");
  await page.keyboard.press("Enter");
  await readTwice();
  assert.equal(asked, 2);
  await page.keyboard.press("Escape");
  await page.click("#tab-chat");
  await page.click("#tab-operations");
  await readTwice();
  assert.equal(asked, 3);
  faults.length = 0; // the console reports the refusals
}));

test("without site data the page works and keeps its state until it is left", () => withPage({}, async (page) => {
  await page.addInitScript(() => {
    const refuse = () => { throw new DOMException("site data is blocked", "SecurityError"); };
    for (const name of ["localStorage", "sessionStorage", "indexedDB"]) Object.defineProperty(window, name, { get: refuse });
    window.BroadcastChannel = class { constructor() { refuse(); } };
  });
  await open(page);
  await page.locator(".toast").filter({ hasText: "does not store conversations" }).waitFor();
  const bodies = await answerWith(page, () => [{ content: "I am here." }]);
  await set(page, { temperature: "0.3", "api-key": "secret" });
  await ask(page, "Hello");
  await page.getByText("I am here.").waitFor();
  assert.equal(bodies[0].temperature, 0.3);
  await page.click("#theme");
  assert.equal(await page.evaluate(() => document.documentElement.dataset.theme), "dark");
  await page.click("#toggle-sidebar");
  await page.click("#tab-operations");
  await page.locator(".tile").first().waitFor();
  await page.getByText("1 hour").click();
  await page.click("#tab-chat");
  await page.getByText("I am here.").waitFor();
}));

test("settings and the draft survive a reload, and keys survive it in this tab only unless they are remembered", () => withPage({}, async (page) => {
  await open(page);
  const values = { temperature: "0.3", "top-p": "0.9", "max-tokens": "77", system: "Be brief.", tools: "[]", "api-key": "secret" };
  await set(page, values);
  await page.fill("#prompt", "a draft");
  await page.reload();
  await ready(page);
  for (const [id, value] of Object.entries(values)) assert.equal(await page.inputValue(`#${id}`), value, id);
  assert.equal(await page.inputValue("#prompt"), "a draft");
  assert.doesNotMatch(await page.evaluate(() => JSON.stringify({ ...localStorage })), /secret/);
  await page.click("#open-settings");
  await page.check("#remember-keys");
  assert.match(await page.evaluate(() => JSON.stringify({ ...localStorage })), /secret/);
  await shot(page, "settings");
  await page.keyboard.press("Escape");
  const bodies = await answerWith(page, () => [{ content: "ok" }]);
  await ask(page, "Hello");
  const { messages, temperature, top_p, max_tokens } = bodies[0];
  assert.deepEqual({ temperature, top_p, max_tokens, first: messages[0] },
    { temperature: 0.3, top_p: 0.9, max_tokens: 77, first: { role: "system", content: "Be brief." } });
}));

test("a phone of 320 pixels needs no horizontal scrolling", () => withPage(ON_PHONE, async (page) => {
  await open(page);
  await noSidewaysScroll(page);
  await shot(page, "empty-phone");
  await answerWith(page, () => [{ content: `${"averylongwordwithoutanyspace".repeat(10)}\n\n\`\`\`\n${"code ".repeat(60)}\n\`\`\`\n\n|${"column|".repeat(12)}\n|${"-|".repeat(12)}\n|${"cell|".repeat(12)}` },
    { tool_calls: [{ index: 0, id: "1", function: { name: "a_tool_with_quite_a_long_name", arguments: `{"text": "${"x".repeat(200)}"}` } }] }]);
  await ask(page, "x".repeat(300));
  await noSidewaysScroll(page);
  await shot(page, "chat-phone");
  await page.click("#open-settings");
  await noSidewaysScroll(page);
  await shot(page, "settings-phone");
  await page.keyboard.press("Escape");
  await page.click("#toggle-sidebar");
  await page.locator(".conversation").waitFor();
  await noSidewaysScroll(page);
  await shot(page, "chats-phone");
  await page.getByLabel(/^Actions for/).click();
  await page.getByRole("menu").waitFor();
  const box = await page.getByRole("menu").boundingBox();
  assert.ok(box.x >= 0 && box.x + box.width <= 320 && box.y + box.height <= 640, JSON.stringify(box));
}));

test("colors follow the system, and a choice is kept", () => withPage({ colorScheme: "dark" }, async (page) => {
  await open(page);
  const theme = () => page.evaluate(() => document.documentElement.dataset.theme);
  assert.equal(await theme(), "dark");
  await page.click("#theme");
  await page.reload();
  assert.equal(await theme(), "light");
  await ready(page);
  await page.click("#theme");
  await page.emulateMedia({ colorScheme: "light" });
  await page.waitForFunction(() => document.documentElement.dataset.theme === "light"); // it follows the system again
}));
