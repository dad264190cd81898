// Runs the page's tests in Chromium: fails on errors of the page, writes screenshots to MOESAIC_OUT, and replaces answers of
// the server.
import assert from "node:assert/strict";
import { createServer } from "node:http";
import { after, before } from "node:test";
import { chromium } from "playwright-core";

export const url = process.env.MOESAIC_URL;
export const CHAT = "**/v1/chat/completions";
export const DESK = { width: 1280, height: 800 };
export const PHONE = { width: 320, height: 640 };
export const ON_PHONE = { viewport: PHONE, hasTouch: true, isMobile: true };
const PATIENCE = Number(process.env.MOESAIC_PATIENCE_MS ?? 60000); // longer on a busy machine
let browser, noticeMs; // time for which the page shows a notice

before(async () => {
  noticeMs = 1000 * /const SECONDS = (\d+);/.exec(await (await fetch(`${url}/js/toast.js`)).text())[1];
  browser = await chromium.launch({
    executablePath: process.env.CHROMIUM, headless: true, timeout: PATIENCE,
    args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
      "--disable-component-update", "--disable-sync"],
  });
});
after(() => browser.close());

/// Runs `use(page, faults)` in a browser without history. Errors of the page and of its console fail the test, unless `use`
/// removes them from `faults`.
export async function withPage(options, use) {
  const context = await browser.newContext({ viewport: DESK, ...options });
  context.setDefaultTimeout(PATIENCE);
  await context.addInitScript(([patience, notice]) => { // notices stay as long as a step may take
    const wait = window.setTimeout;
    window.setTimeout = (then, ms, ...rest) => wait(then, ms === notice ? patience : ms, ...rest);
  }, [PATIENCE, noticeMs]);
  const page = await context.newPage();
  const faults = [];
  page.on("pageerror", (error) => faults.push(error.message));
  page.on("console", (message) => { if (message.type() === "error") faults.push(message.text()); });
  try {
    await use(page, faults);
    assert.deepEqual(faults, []);
  } finally {
    await context.close();
  }
}

/// Removes refusals by the page's policy from `faults`. The browser reports them while it parses HTML, before the page
/// sanitizes it.
export function allowRefusals(faults) {
  faults.splice(0, faults.length, ...faults.filter((fault) => !fault.includes("Content Security Policy")));
}

export async function open(page, hash = "") {
  await page.goto(`${url}/${hash}`);
  await ready(page);
}

export const ready = (page) => page.locator("body[data-ready]").waitFor();
export const shot = (page, name) => page.screenshot({ path: `${process.env.MOESAIC_OUT}/${name}.png` });
export const answer = (page) => page.locator(".turn.assistant").last();
export const settled = (page) => page.locator(".turn.assistant:last-child:not(.pending) footer").waitFor();

export async function send(page, text) {
  await page.fill("#prompt", text);
  await page.press("#prompt", "Enter");
}

export async function ask(page, text) {
  const turns = await page.locator(".turn.assistant").count();
  await send(page, text);
  await page.locator(".turn.assistant").nth(turns).waitFor();
  await settled(page);
}

export async function set(page, fields) {
  await page.click("#open-settings");
  for (const [id, value] of Object.entries(fields)) await page.fill(`#${id}`, value);
  await page.getByText("Done").click();
}

/// Answers with words until the page leaves. Returns {left}, a promise that resolves then.
export async function answerWithoutEnd(page) {
  let leave;
  const left = new Promise((resolve) => { leave = resolve; });
  const server = createServer((request, response) => {
    response.writeHead(200, { "content-type": "text/event-stream" });
    let n = 0;
    const timer = setInterval(() => response.write(`data: ${JSON.stringify({ choices: [{ index: 0, delta: { content: `word${++n} ` } }] })}\n\n`), 20);
    response.on("close", () => {
      clearInterval(timer);
      leave();
      server.close();
    });
  });
  await new Promise((resolve) => { server.listen(0, "127.0.0.1", resolve); });
  server.unref();
  await page.unroute(CHAT);
  await page.route(CHAT, (route) => route.continue({ url: `http://127.0.0.1:${server.address().port}/` }));
  return { left };
}

export async function noSidewaysScroll(page) {
  const [wide, seen] = await page.evaluate(() => [document.documentElement.scrollWidth, innerWidth]);
  assert.ok(wide <= seen, `the page is ${wide} wide on a screen of ${seen}`);
}

/// Answers with the list of deltas that `respond(body)` returns, and ends the answers with the reason `finish`. Returns the
/// list of the bodies that the page sent.
export async function answerWith(page, respond, finish = "stop") {
  const bodies = [];
  await page.unroute(CHAT);
  await page.route(CHAT, (route) => {
    bodies.push(route.request().postDataJSON());
    const deltas = respond(bodies.at(-1), bodies.length);
    const body = deltas.map((delta, i) => `data: ${JSON.stringify({ choices: [{ index: 0, delta,
      finish_reason: i === deltas.length - 1 ? finish : null }] })}\n\n`).join("") + "data: [DONE]\n\n";
    return route.fulfill({ status: 200, contentType: "text/event-stream", body });
  });
  return bodies;
}
