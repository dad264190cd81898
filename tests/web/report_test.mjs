// Tests the page of `moesaic report` in Chromium: plots fill their panels, and nothing is cut off on a phone.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { pathToFileURL } from "node:url";
import { DESK, PHONE, withPage } from "./browser.mjs";

const TINY = process.env.MOESAIC_MODEL;
const folder = mkdtempSync(join(tmpdir(), "moesaic-report-"));
const quantized = join(folder, "int8");
const moesaic = (...words) => execFileSync(process.env.MOESAIC_BINARY, words, { stdio: ["ignore", "pipe", "inherit"] });

before(() => {
  moesaic("quantize", TINY, "-o", quantized, "--scheme", "w8a8");
  moesaic("report", quantized, "--source", TINY, "--text", join(TINY, "heldout.jsonl"), "-c", "256", "--max-tokens", "512");
});
after(() => rmSync(folder, { recursive: true }));

for (const [name, viewport, colorScheme] of [
  ["desk", DESK, "light"], ["dark", DESK, "dark"], ["tablet", { width: 768, height: 1024 }, "light"], ["phone", PHONE, "dark"]]) {
  test(`plots fill their panels: ${name}`, () => withPage({ viewport, colorScheme }, async (page) => {
    await page.goto(pathToFileURL(join(quantized, "report.html")).href);
    const plots = await page.$$eval("svg", (all) => all.map((svg) => {
      const panel = svg.closest("section"), style = getComputedStyle(panel);
      const room = panel.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
      const texts = [...svg.querySelectorAll("text")].map((text) => text.getBoundingClientRect());
      const box = svg.getBoundingClientRect();
      return { room, width: box.width, least: Math.min(...texts.map((text) => text.height)),
        outside: texts.filter((text) => text.left < box.left - 1 || text.right > box.right + 1).length };
    }));
    assert.ok(plots.length >= 3);
    for (const { room, width, least, outside } of plots) {
      assert.ok(Math.abs(width - Math.max(room, 19 * 16)) <= 1, `${width} px wide in a panel of ${room}`);
      assert.ok(least >= 8, `text of ${least} px`);
      assert.equal(outside, 0);
    }
    const [body, window] = await page.evaluate(() => [document.documentElement.scrollWidth, innerWidth]);
    assert.ok(body <= window, `the page is ${body} px wide in a window of ${window}`);
    if (process.env.MOESAIC_OUT) await page.screenshot({ path: join(process.env.MOESAIC_OUT, `report-${name}.png`), fullPage: true });
  }));
}
