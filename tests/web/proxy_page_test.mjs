// Tests the proxy's live page in Chromium, with nginx and two mock engines: it follows requests, and in light, dark and on a
// phone its text is legible and nothing is cut off.
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { existsSync } from "node:fs";
import { createServer } from "node:net";
import { dirname, join } from "node:path";
import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";
import { after, before, test } from "node:test";
import { DESK, ON_PHONE, noSidewaysScroll, shot, withPage } from "./browser.mjs";

const BINARY = process.env.MOESAIC_BINARY;
const MODULE = process.env.MOESAIC_NGINX_MODULE ?? join(dirname(BINARY), "ngx_http_moesaic_module.so");
// An address of this process, so that its ports are free, as in tests/proxy/proxying.py.
const HOST = `127.${64 + ((process.pid >> 16) & 63)}.${(process.pid >> 8) & 255}.${(process.pid & 255) || 1}`;
const STATE = /\?state$/;
const STAGES = 9; // without "done"
const SCREENS = [["desk", { viewport: DESK, colorScheme: "light" }], ["dark", { viewport: DESK, colorScheme: "dark" }],
  ["tablet", { viewport: { width: 768, height: 1024 }, colorScheme: "light" }],
  ["phone", { ...ON_PHONE, colorScheme: "light" }], ["phone-dark", { ...ON_PHONE, colorScheme: "dark" }]];

const folders = [...(process.env.PATH ?? "").split(":"), "/usr/sbin", "/usr/local/sbin"];
if (!folders.some((folder) => existsSync(join(folder, "nginx"))) || !existsSync(MODULE)) {
  console.log("SKIPPED: nginx cannot be found, or its module is not built");
  process.exit(77);
}

const started = [];
let base; // URL of the proxy

const freePort = () => new Promise((resolve) => {
  const server = createServer().listen(0, HOST, () => {
    const { port } = server.address();
    server.close(() => resolve(port));
  });
});

/// Starts a program that ends with this test.
function start(words, stdout) {
  const child = spawn(BINARY, words, { stdio: ["ignore", stdout, "inherit"] });
  started.push(child);
  child.once("exit", () => started.splice(started.indexOf(child), 1));
  return child;
}

async function startEngine() {
  const child = start(["mock-engine", "--host", HOST, "--port", "0", "--step-ms", "20"], "pipe");
  for await (const line of createInterface({ input: child.stdout })) return /http:\S+$/.exec(line)[0];
  throw new Error("the mock engine printed no address");
}

async function stop(child) {
  const ended = new Promise((resolve) => { child.once("exit", resolve); });
  child.kill("SIGTERM");
  await ended;
}

before(async () => {
  const engines = [await startEngine(), await startEngine()];
  const port = await freePort();
  const proxy = start(["proxy", "--module", MODULE, "--host", HOST, "--port", `${port}`, "--workers", "1",
    ...engines.flatMap((engine) => ["--engine", engine])], "ignore");
  base = `http://${HOST}:${port}`;
  while (!(await fetch(`${base}/moesaic/state`).catch(() => ({ ok: false }))).ok) { // with_node.py limits the time
    assert.equal(proxy.exitCode ?? proxy.signalCode, null, "the proxy has ended");
    await sleep(50);
  }
});
after(async () => { for (const child of [...started].reverse()) await stop(child); });

const tile = (page, label, value) => page.locator(".tile", { hasText: label }).locator("b").filter({ hasText: value });
const stage = (page, name, value) => page.locator(".stage", { hasText: name }).locator("b").filter({ hasText: value });
const live = (page) => page.locator("#live.good", { hasText: "live" });

async function openPage(page) {
  await page.goto(`${base}/moesaic`);
  await live(page).waitFor();
}

/// Runs `use` while the engines answer `count` requests.
async function whileAnswering(count, use) {
  const leave = new AbortController();
  try {
    await Promise.all(Array.from({ length: count }, async (_, i) => {
      const answer = await fetch(`${base}/v1/completions`, { method: "POST", signal: leave.signal,
        headers: { "content-type": "application/json" },
        body: JSON.stringify({ model: "mock", prompt: `Story ${i}`, max_tokens: 20000, stream: true }) });
      assert.equal(answer.status, 200);
      await answer.body.getReader().read();
    }));
    await use();
  } finally {
    leave.abort();
  }
}

/// Shows the page a state with many engines, which have long names, and large numbers.
async function showMuch(page) {
  const state = await (await fetch(`${base}/moesaic?state`)).json();
  for (const one of state.stages) Object.assign(one, { now: 123, seconds: 12345.678, count: 100 });
  Object.assign(state.outcomes, { completed: 1234567, failed: 4321, rejected: 12345 });
  state.tokens = { prompt: 9e9, cached: 8.1e9, output: 1e8 };
  state.ttft = { seconds: 18500, count: 1000 };
  state.engines = Array.from({ length: 12 }, (_, i) => ({ ...state.engines[0], rank: i % 3,
    url: `http://inference-engine-${i}.a-namespace-with-a-long-name.svc.cluster.local:8000/prefix`,
    state: ["enabled", "draining", "unhealthy"][i % 3], index: ["exact", "degraded", "replaying", "none"][i % 4],
    prefill_requests: 12, prefill_tokens: 123456 * i, decode_requests: 250, decode_tokens: 2345678, prompt_tokens: 1e9,
    cached_tokens: 9e8, completed: 123456789, failed: 1234 }));
  await page.route(STATE, (route) => route.fulfill({ json: state }));
}

/// Returns the elements whose content does not fit.
const cutOff = (page) => page.evaluate(() => [
  ...document.querySelectorAll("header, h2, .tile, .tile *, .stage, .stage > *, .engine, .head, .facts")]
  .filter((element) => element.clientWidth > 0 && element.scrollWidth > element.clientWidth + 1)
  .map((element) => `${element.className} ${element.textContent}`));

/// Returns texts with a contrast below 4.5 and bars with one below 3 (WCAG 2.2, 1.4.3 and 1.4.11).
const faint = (page) => page.evaluate(() => {
  const color = (text) => text.match(/[\d.]+/g).map(Number);
  const linear = (value) => (value / 255 <= 0.03928 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4);
  const luminance = ([red, green, blue]) => 0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue);
  const contrast = (a, b) => {
    const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  const backgroundOf = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const found = color(getComputedStyle(at).backgroundColor);
      if (found.length < 4 || found[3] > 0) return found;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const element of document.querySelectorAll("main *")) {
    if (![...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.textContent.trim())) continue;
    if (contrast(color(getComputedStyle(element).color), backgroundOf(element)) < 4.5) found.push(element.textContent);
  }
  for (const bar of document.querySelectorAll(".fill, .split i")) {
    if (contrast(backgroundOf(bar), backgroundOf(bar.parentElement)) < 3) found.push(`a bar of ${bar.parentElement.className}`);
  }
  return { found, dark: luminance(backgroundOf(document.body)) < 0.1 };
});

async function isWellLaidOut(page, colorScheme) {
  await noSidewaysScroll(page);
  assert.deepEqual(await cutOff(page), []);
  assert.deepEqual(await faint(page), { found: [], dark: colorScheme === "dark" });
}

for (const [name, options] of SCREENS) {
  test(`the proxy's page follows requests: ${name}`, () => withPage(options, async (page) => {
    await openPage(page);
    await page.locator("h1", { hasText: /^Pool / }).waitFor();
    await page.locator(".engine").nth(1).waitFor();
    assert.equal(await page.locator(".engine").count(), 2);
    assert.equal(await page.locator(".stage").count(), STAGES);
    await whileAnswering(2, async () => {
      await tile(page, "requests in the proxy", /^2$/).waitFor();
      await stage(page, "decode running", /^2$/).waitFor();
      await isWellLaidOut(page, options.colorScheme);
      await shot(page, `proxy-${name}`);
    });
    await tile(page, "requests in the proxy", /^0$/).waitFor();
    await stage(page, "decode running", /^0$/).waitFor();
  }));

  test(`the proxy's page has room for many engines with long names: ${name}`, () => withPage(options, async (page) => {
    await showMuch(page);
    await openPage(page);
    await page.locator(".engine").nth(11).waitFor();
    await tile(page, "prompt tokens cached", /^90\.0%$/).waitFor();
    await tile(page, "failed or lost", /^4,321$/).waitFor();
    await isWellLaidOut(page, options.colorScheme);
    await shot(page, `proxy-many-${name}`);
  }));
}

test("on a phone the bar of a stage is below its name", () => withPage(ON_PHONE, async (page) => {
  await openPage(page);
  const [row, label, track] = await page.evaluate(() => {
    const first = document.querySelector(".stage");
    return [first, first.firstElementChild, first.querySelector(".track")].map((element) => element.getBoundingClientRect().toJSON());
  });
  assert.ok(track.top >= label.bottom, `the track begins at ${track.top}, and the name ends at ${label.bottom}`);
  assert.ok(Math.abs(track.width - row.width) <= 1, `the track is ${track.width} wide in a row of ${row.width}`);
}));

test("the proxy's page reports a proxy that does not answer", () => withPage({}, async (page, faults) => {
  await openPage(page);
  await page.route(STATE, (route) => route.fulfill({ status: 503 }));
  await page.locator("#live.bad", { hasText: "no answer" }).waitFor();
  await page.unroute(STATE);
  await live(page).waitFor();
  assert.ok(faults.length > 0 && faults.every((fault) => fault.includes("503")), `${faults}`);
  faults.splice(0);
}));
