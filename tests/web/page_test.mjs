// The web page in Chromium, on models/moesaic-tiny: chat, stop, regenerate, reasoning, tools, and the operations view, in
// light and dark, on a desk and on a phone. Leaves screenshots in MOESAIC_OUT.
import assert from "node:assert/strict";
import test, { after, before } from "node:test";
import { chromium } from "playwright-core";

const url = process.env.MOESAIC_URL;
const CHAT = "**/v1/chat/completions";
const DESK = { width: 1280, height: 800 };
const PHONE = { width: 375, height: 720 };
const WEATHER = [{ type: "function", function: {
  name: "get_weather", description: "Get the weather in a city.",
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }];
let browser;

before(async () => {
  browser = await chromium.launch({
    executablePath: process.env.CHROMIUM, headless: true,
    args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
      "--disable-component-update", "--disable-sync"],
  });
});
after(() => browser.close());

async function withPage(options, use) {
  const context = await browser.newContext({ viewport: DESK, ...options });
  const page = await context.newPage();
  const faults = [];
  page.on("pageerror", (error) => faults.push(error.message));
  page.on("console", (message) => { if (message.type() === "error") faults.push(message.text()); });
  try {
    await use(page);
    assert.deepEqual(faults, []);
  } finally {
    await context.close();
  }
}

const shot = (page, name) => page.screenshot({ path: `${process.env.MOESAIC_OUT}/${name}.png` });
const answer = (page) => page.locator(".turn.assistant").last();
const settled = (page) => page.locator(".turn.assistant:last-child:not(.pending) footer").waitFor();

async function tilesHoldTheirText(page) {
  const over = await page.evaluate(() => [...document.querySelectorAll(".tile")].filter((tile) => tile.scrollWidth > tile.clientWidth)
    .map((tile) => tile.innerText));
  assert.deepEqual(over, []);
}

async function send(page, text) {
  await page.fill("#prompt", text);
  await page.press("#prompt", "Enter");
}

async function set(page, fields) {
  await page.click("#open-settings");
  for (const [id, value] of Object.entries(fields)) await page.fill(`#${id}`, value);
  await page.click("#open-settings");
}

/// Makes answers `tokens` long: the model's own are over in a moment.
const lengthen = (page, tokens) => page.route(CHAT, (route) => route.continue({
  postData: JSON.stringify({ ...route.request().postDataJSON(), ignore_eos: true, max_tokens: tokens }) }));

async function noSidewaysScroll(page) {
  const [wide, seen] = await page.evaluate(() => [document.documentElement.scrollWidth, innerWidth]);
  assert.ok(wide <= seen, `the page is ${wide} wide on a screen of ${seen}`);
}

/// Streams `chunks` as the server would, for what models/moesaic-tiny itself never says.
async function answerWith(page, deltas) {
  const body = deltas.map((delta, i) => `data: ${JSON.stringify({ choices: [{ index: 0, delta,
    finish_reason: i === deltas.length - 1 ? "stop" : null }] })}\n\n`).join("") + "data: [DONE]\n\n";
  await page.route(CHAT, (route) => route.fulfill({ status: 200, contentType: "text/event-stream", body }));
}

test("a message is sent and its answer streams", () => withPage({}, async (page) => {
  await page.goto(url);
  await page.getByText("What would you like to know?").waitFor();
  await shot(page, "empty");
  await set(page, { temperature: "0" });
  await send(page, "What is the capital of France?");
  await settled(page);
  assert.match(await answer(page).innerText(), /Paris/);
  assert.match(await answer(page).locator("footer").innerText(), /tokens.*first token/);
  await lengthen(page, 1500);
  await page.evaluate(() => {
    window.lengths = new Set();
    new MutationObserver(() => window.lengths.add(document.querySelector(".turn.assistant:last-child .text")?.innerText.length))
      .observe(document.getElementById("thread"), { childList: true, subtree: true });
  });
  await send(page, "Tell me a story.");
  await settled(page);
  await page.unroute(CHAT);
  assert.ok(await page.evaluate(() => window.lengths.size) > 3, "the text came in pieces");
  await shot(page, "chat-light");
  await page.reload();
  assert.equal(await page.locator(".turn").count(), 4, "a reload keeps the chat");
}));

test("an answer is stopped and regenerated", () => withPage({}, async (page) => {
  await lengthen(page, 3500);
  await page.goto(url);
  await send(page, "Tell me a story.");
  await page.locator(".turn.assistant.pending .text").filter({ hasText: /\w{3}/ }).waitFor();
  await page.click("#stop");
  await settled(page);
  assert.ok(await page.locator("#send").isVisible());
  const running = async () => Number(/num_requests_running\S* (\d+)/.exec(await (await fetch(`${url}/metrics`)).text())[1]);
  for (let i = 0; i < 100 && await running() > 0; ++i) await page.waitForTimeout(50);
  assert.equal(await running(), 0, "the server has stopped too");
  await page.unroute(CHAT);
  await answer(page).getByText("Regenerate").click();
  await settled(page);
  assert.equal(await page.locator(".turn").count(), 2);
  await page.click("#clear");
  await page.getByText("What would you like to know?").waitFor();
}));

test("a call of a tool is shown", () => withPage({}, async (page) => {
  await page.goto(url);
  await set(page, { temperature: "0", tools: JSON.stringify(WEATHER) });
  await send(page, "What's the weather like in Geneva?");
  await settled(page);
  const call = page.locator(".call");
  assert.match(await call.locator("header").innerText(), /get_weather/);
  assert.match(await call.locator("pre").innerText(), /"city": "Geneva"/);
  await shot(page, "tools");
}));

test("thoughts are shown apart, and text is formatted but never markup", () => withPage({ colorScheme: "dark" }, async (page) => {
  await page.goto(url);
  await answerWith(page, [{ reasoning_content: "First I think.\n" }, { reasoning_content: "Then I know." },
    { content: "# Answer\nIt is **bold** and `code`.\n\n- one\n- two\n\n```\nlet x = 1;\n```\n<img src=x onerror=alert(1)>" }]);
  await send(page, "Think!");
  await settled(page);
  const thought = page.locator("details.thought");
  assert.equal(await thought.getAttribute("open"), null, "folded once the answer is there");
  await thought.locator("summary").click();
  assert.match(await thought.innerText(), /Then I know/);
  assert.equal(await answer(page).locator("strong").innerText(), "bold");
  assert.equal(await answer(page).locator("li").count(), 2);
  assert.equal(await answer(page).locator("img").count(), 0);
  await shot(page, "reasoning-dark");
}));

test("an error is told", () => withPage({}, async (page) => {
  await page.goto(url);
  await set(page, { tools: "not JSON" });
  await send(page, "Hello");
  await settled(page);
  assert.match(await page.locator(".fault").innerText(), /Tools/);
}));

test("the operations view moves", () => withPage({}, async (page) => {
  await page.goto(`${url}/#operations`);
  await page.locator(".tile").first().waitFor();
  const load = Promise.all([1, 2, 3, 4].map((i) => fetch(`${url}/v1/chat/completions`, { method: "POST", body: JSON.stringify({
    messages: [{ role: "user", content: `Tell me story ${i}.` }], ignore_eos: true, max_tokens: 2500 }) })));
  await page.locator("#requests tbody tr").first().waitFor();
  const tile = page.locator(".tile", { hasText: "Output" }).locator(".value");
  const values = new Set();
  let used = false;
  for (let i = 0; i < 60 && (values.size < 3 || !used); ++i) {
    values.add(await tile.innerText());
    used ||= /^[1-9]\d* blocks in use.*nodes/.test(await page.locator("#blocks-caption").innerText());
    await page.waitForTimeout(100);
  }
  assert.ok(values.size >= 3, `throughput stood at ${[...values]}`);
  assert.ok(used, "blocks in use are shown");
  await shot(page, "operations-light");
  await page.click("#theme");
  assert.equal(await page.evaluate(() => document.documentElement.dataset.theme), "dark");
  await shot(page, "operations-dark");
  await page.setViewportSize(PHONE);
  await noSidewaysScroll(page);
  await tilesHoldTheirText(page);
  await shot(page, "operations-phone");
  await load;
}));

test("a phone shows all of it without scrolling sideways", () => withPage({ viewport: PHONE, hasTouch: true, isMobile: true }, async (page) => {
  await page.goto(url);
  await answerWith(page, [{ content: `${"averylongwordwithoutanyspace".repeat(10)}\n\n\`\`\`\n${"code ".repeat(60)}\n\`\`\`` }]);
  await send(page, "x".repeat(300));
  await settled(page);
  await noSidewaysScroll(page);
  await shot(page, "chat-phone");
  await page.click("#open-settings");
  await noSidewaysScroll(page);
  await shot(page, "settings-phone");
}));

test("colours follow the system, and a choice is kept", () => withPage({ colorScheme: "dark" }, async (page) => {
  await page.goto(url);
  const theme = () => page.evaluate(() => document.documentElement.dataset.theme);
  assert.equal(await theme(), "dark");
  await page.click("#theme");
  await page.reload();
  assert.equal(await theme(), "light");
}));
