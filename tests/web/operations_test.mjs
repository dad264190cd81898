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
