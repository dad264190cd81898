// Tests the operations view in Chromium: tiles, charts over an hour that survive a reload, blocks and requests.
import assert from "node:assert/strict";
import test from "node:test";
import { ON_PHONE, PHONE, noSidewaysScroll, open, ready, shot, url, withPage } from "./browser.mjs";

const chart = (page, title) => page.locator(".chart", { hasText: title });
const value = (page, title, name) => chart(page, title).locator(".u-series", { hasText: name }).locator(".u-value").innerText();

/// Stores an hour of readings as an earlier page does. Values rise each minute, and some minutes are missing.
const fillHour = (page) => page.evaluate(async () => {
  const database = await import(new URL("js/database.js", location.href));
  const now = Date.now() / 1000;
  const samples = [];
  for (let age = 3590; age > 10; age -= 2) {
    const minute = Math.floor(age / 60);
    if (minute >= 20 && minute < 25) continue;
    const busy = 30 + 25 * Math.sin(age / 200);
    samples.push({ time: now - age, values: [busy * 20, 1000 + minute, 0.1 + busy / 400, 0.2 + busy / 300, 0.3 + busy / 100, 0.01, 0.02, 0.03 + busy / 4000, Math.round(busy / 5), Math.round(busy / 12)] });
  }
  await database.put("samples", ...samples);
});

const generate = (n, tokens) => Promise.all(Array.from({ length: n }, (_, i) => fetch(`${url}/v1/chat/completions`, { method: "POST",
  headers: { "content-type": "application/json" },
  body: JSON.stringify({ messages: [{ role: "user", content: `Tell me story ${i}.` }], ignore_eos: true, max_tokens: tokens }) }).then((response) => response.text())));

async function tilesHoldTheirText(page) {
  const over = await page.evaluate(() => [...document.querySelectorAll(".tile")].filter((tile) => tile.scrollWidth > tile.clientWidth)
    .map((tile) => tile.innerText));
  assert.deepEqual(over, []);
}

test("tiles, blocks and requests follow the server", () => withPage({}, async (page) => {
  await open(page, "#operations");
  await page.locator(".tile").first().waitFor();
  // Requests run until the view has shown them.
  let watching = true;
  const load = (async () => { while (watching) await generate(4, 3000); })();
  try {
    await page.locator("#requests tbody tr").first().waitFor();
    await page.locator("#blocks-caption").filter({ hasText: /^[1-9]\d* blocks in use.*nodes/ }).waitFor();
    await page.locator("#health[data-state=busy]").waitFor();
    const tile = page.locator(".tile", { hasText: "Output" }).locator(".value");
    const values = new Set();
    for (let i = 0; i < 300 && values.size < 3; ++i) {
      values.add(await tile.innerText());
      await page.waitForTimeout(200);
    }
    assert.ok(values.size >= 3, `throughput stood at ${[...values]}`);
    await shot(page, "operations-running");
  } finally {
    watching = false;
    await load;
  }
  await page.locator("#requests-caption").filter({ hasText: "No request is running." }).waitFor();
  await page.locator("#health[data-state=ready]").waitFor();
}));

test("charts show an hour that earlier pages read, with clock times and the values under the pointer", () => withPage({}, async (page) => {
  await open(page, "#operations");
  await chart(page, "Throughput").locator("canvas").waitFor();
  await fillHour(page);
  await page.reload();
  await ready(page);
  await page.getByText("1 hour").click();
  await page.locator(".tile").first().waitFor();
  const plot = chart(page, "Throughput").locator(".u-over");
  const box = await plot.boundingBox();
  const seen = [];
  for (const part of [0.1, 0.9]) { // about 54 and 6 minutes ago
    await page.mouse.move(box.x + box.width * part, box.y + box.height / 2);
    const time = await value(page, "Throughput", "Time");
    assert.match(time, /^\d\d:\d\d:\d\d$/);
    assert.equal(await value(page, "Requests", "Time"), time, "the pointer is the same in all charts");
    seen.push(Number(await value(page, "Throughput", "output")) - 1000);
  }
  assert.ok(seen[0] > 50 && seen[0] < 57 && seen[1] > 3 && seen[1] < 10, `values of ${seen} minutes ago`);
  await shot(page, "charts-hover");
  // The line has a gap at times without an open page.
  await page.mouse.move(box.x + box.width * (1 - 22.5 / 60), box.y + box.height / 2);
  assert.equal(await value(page, "Throughput", "output").then((text) => /^10(19|2[0-6])$|–/.test(text)), true);
  await page.mouse.move(box.x + box.width * 0.3, box.y + 20);
  await page.mouse.down();
  await page.mouse.move(box.x + box.width * 0.4, box.y + 20, { steps: 4 });
  await page.mouse.up();
  await page.mouse.move(box.x + 2, box.y + 20);
  const zoomed = Number(await value(page, "Throughput", "output")) - 1000;
  assert.ok(zoomed > 38 && zoomed < 46, `the left edge is ${zoomed} minutes ago after the zoom`);
  await page.reload();
  await ready(page);
  assert.ok(await page.locator("input[name=window][value='3600']").isChecked(), "the window is kept");
  await chart(page, "Throughput").locator("canvas").waitFor();
  const stored = await page.evaluate(async () => (await (await import(new URL("js/database.js", location.href))).getAll("samples")).length);
  assert.ok(stored > 1500, `${stored} readings are stored`);
}));

test("old readings are removed from the browser", () => withPage({}, async (page) => {
  await open(page);
  await page.evaluate(async () => {
    const database = await import(new URL("js/database.js", location.href));
    await database.put("samples", { time: Date.now() / 1000 - 7200, values: new Array(10).fill(1) });
  });
  await page.reload();
  await page.waitForFunction(async () => {
    const database = await import(new URL("js/database.js", location.href));
    const all = await database.getAll("samples");
    return all.length > 0 && all.every(({ time }) => time > Date.now() / 1000 - 3700);
  });
}));

for (const [name, options] of [["light", {}], ["dark", { colorScheme: "dark" }], ["phone", ON_PHONE], ["phone-dark", { ...ON_PHONE, colorScheme: "dark" }]]) {
  test(`the operations view fits: ${name}`, () => withPage(options, async (page) => {
    await open(page, "#operations");
    await fillHour(page);
    await page.reload();
    await ready(page);
    await page.getByText("1 hour").click();
    await page.locator(".tile").first().waitFor();
    await chart(page, "Throughput").locator("canvas").waitFor();
    await noSidewaysScroll(page);
    await tilesHoldTheirText(page);
    await shot(page, `operations-${name}`);
    await page.locator("#requests-caption").scrollIntoViewIfNeeded();
    await shot(page, `operations-end-${name}`);
  }));
}

test("a chart follows the width of the window and the colors of the theme", () => withPage({}, async (page) => {
  await open(page, "#operations");
  const canvas = chart(page, "Throughput").locator("canvas");
  await canvas.waitFor();
  await page.setViewportSize(PHONE);
  await page.waitForFunction(() => document.querySelector(".u-wrap").getBoundingClientRect().right <= innerWidth);
  await noSidewaysScroll(page);
  await page.click("#theme");
  await canvas.waitFor();
  await noSidewaysScroll(page);
}));

/// Answers /state with experts of 58 layers on `ranks` ranks, and with the server's other members.
async function replaceExperts(page, ranks, change = {}) {
  const layers = Array.from({ length: 58 }, (_, i) => i + 3);
  const matrix = layers.map((layer) => Array.from({ length: ranks }, (_, rank) => 1 + 0.3 * Math.sin(layer * 3 + rank) * Math.cos(rank * layer)));
  matrix[7][1] = 1.734;
  await page.route("**/state", async (route) => {
    const answer = await route.fetch();
    const state = await answer.json();
    state.experts = { state: "idle", epoch: 3, history: ["layer 9 planned", "move 3 of layer 10 is <in use>"],
      rank_load: { layers, over_mean: matrix }, ...change };
    await route.fulfill({ json: state });
  });
}

for (const [name, options, ranks] of [["light", {}, 32], ["dark", { colorScheme: "dark" }, 144], ["phone", ON_PHONE, 32]]) {
  test(`a heat map shows the load of ranks by layer: ${name}`, () => withPage(options, async (page) => {
    await replaceExperts(page, ranks);
    await open(page, "#operations");
    const caption = page.locator("#experts-caption");
    await caption.filter({ hasText: "1.73 times the mean on rank 1 in layer 10" }).waitFor();
    assert.match(await page.locator("#experts-map canvas").getAttribute("aria-label"), /1\.73 times the mean/);
    assert.deepEqual(await page.locator("#experts-history li").allInnerTexts(), ["move 3 of layer 10 is <in use>", "layer 9 planned"]);
    await noSidewaysScroll(page);
    await page.locator("#experts-panel").scrollIntoViewIfNeeded();
    // The cell of layer 10 (the eighth row) and rank 1, whose loads are the largest, is colored more than a balanced one.
    const canvas = page.locator("#experts-map canvas");
    const cell = await canvas.evaluate((node, count) => (node.clientWidth - 40) / count, ranks);
    const box = await canvas.boundingBox();
    await page.mouse.move(box.x + 40 + 1.5 * cell, box.y + 7.5 * 8);
    await caption.filter({ hasText: "Layer 10, rank 1: 1.734 times the mean" }).waitFor();
    await page.mouse.move(1, 1);
    await caption.filter({ hasText: "Experts may move; none does now." }).waitFor();
    await page.locator("#experts-caption").scrollIntoViewIfNeeded();
    await shot(page, `experts-${name}`);
  }));
}

test("the heat map is hidden where ranks do not divide the experts", () => withPage({}, async (page) => {
  await open(page, "#operations");
  await page.locator("#blocks-caption").filter({ hasText: "nodes in the prefix tree" }).waitFor();
  assert.equal(await page.locator("#experts-panel").isVisible(), false);
}));
