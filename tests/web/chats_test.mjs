// Tests the list of conversations: storage, names, deletion with undo, export, import, and other tabs.
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import test from "node:test";
import { CHAT, allowRefusals, answer, answerWith, answerWithoutEnd, ask, open, ready, send, settled, shot, url, withPage } from "./browser.mjs";

const titles = (page) => page.locator(".conversation a").allInnerTexts();
const echo = (page) => answerWith(page, (body) => [{ content: `You said **${body.messages.at(-1).content}**.` }]);

async function choose(page, title, action) {
  await page.getByLabel(`Actions for ${title}`).click();
  await page.getByRole("menuitem", { name: action }).click();
}

async function start(page, text) {
  await page.click("#new-chat");
  await page.getByText("What would you like to know?").waitFor();
  await ask(page, text);
}

/// Keeps the stored conversations locked, as a slow disk would, until the returned page is closed.
async function holdStorage(page) {
  const other = await page.context().newPage();
  await other.goto(`${url}/js/database.js`);
  await other.evaluate(() => new Promise((resolve) => {
    indexedDB.open("moesaic").onsuccess = ({ target }) => {
      const all = target.result.transaction("conversations", "readwrite").objectStore("conversations");
      const hold = () => { all.count().onsuccess = hold; };
      all.count().onsuccess = () => {
        hold();
        resolve();
      };
    };
  }));
  return other;
}

const unsaved = (page) => page.evaluate(() => Object.keys(localStorage).filter((name) => name.startsWith("moesaic.unsaved.")));

test("conversations are listed, found, renamed, and survive a reload", () => withPage({}, async (page) => {
  await open(page);
  await echo(page);
  for (const text of ["first chat", "second chat", "third thing"]) await start(page, text);
  assert.deepEqual(await titles(page), ["third thing", "second chat", "first chat"]);
  await page.fill("#filter", "CHAT");
  assert.deepEqual(await titles(page), ["second chat", "first chat"]);
  await page.fill("#filter", "");
  await choose(page, "second chat", "Rename");
  await page.getByLabel("Title").fill("A better name");
  await page.getByLabel("Title").press("Enter");
  await page.getByRole("link", { name: "A better name" }).click();
  await page.getByText("You said second chat.").waitFor();
  await shot(page, "chats");
  await page.reload();
  await ready(page);
  assert.deepEqual(await titles(page), ["third thing", "A better name", "first chat"]);
  assert.match(await answer(page).innerText(), /second chat/);
  assert.match(await page.title(), /A better name/);
  await page.goBack();
  await page.getByText("You said third thing.").waitFor();
}));

test("a message that is sent at once after a change of the conversation belongs to the new one", () => withPage({}, async (page) => {
  await open(page);
  const bodies = await echo(page);
  await start(page, "first");
  const clickAndSend = (selector, text) => page.locator(selector).evaluate((link, words) => {
    const prompt = document.getElementById("prompt");
    prompt.value = words;
    link.click();
    prompt.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true, cancelable: true }));
  }, text);
  await clickAndSend("#new-chat", "second");
  await page.getByText("You said second.").waitFor();
  assert.deepEqual(await titles(page), ["second", "first"]);
  assert.equal(bodies.at(-1).messages.length, 1);
  await clickAndSend(".conversation a[title=first]", "third");
  await page.getByText("You said third.").waitFor();
  await page.getByText("You said first.").waitFor();
  assert.deepEqual(await titles(page), ["first", "second"]);
  assert.deepEqual(bodies.at(-1).messages.map(({ content }) => content), ["first", "You said **first**.", "third"]);
}));

test("Undo restores a deleted conversation, which is removed without it", () => withPage({}, async (page) => {
  await open(page);
  await echo(page);
  for (const text of ["keep", "drop"]) await start(page, text);
  await choose(page, "drop", "Delete");
  await page.getByText("What would you like to know?").waitFor();
  assert.deepEqual(await titles(page), ["keep"]);
  await shot(page, "undo");
  await page.getByText("Undo").click();
  await page.getByText("You said drop.").waitFor();
  assert.deepEqual(await titles(page), ["drop", "keep"]);
  await choose(page, "drop", "Delete");
  await page.getByLabel("Dismiss").click();
  await choose(page, "keep", "Delete");
  await page.reload();
  await ready(page);
  assert.deepEqual(await titles(page), []);
  const left = await page.evaluate(async () => {
    const database = await import(new URL("js/database.js", location.href));
    return [(await database.getAll("conversations")).length, (await database.getAll("messages")).length];
  });
  assert.deepEqual(left, [0, 0], "nothing of them is left in the browser");
  assert.deepEqual(await unsaved(page), []);
}));

test("Undo, a name and a deletion are stored although the page is left at once", () => withPage({}, async (page) => {
  await open(page);
  await echo(page);
  for (const text of ["keep", "drop", "name"]) await start(page, text);
  await choose(page, "keep", "Delete");
  const held = await holdStorage(page);
  await page.getByText("Undo").click();
  await choose(page, "name", "Rename");
  await page.getByLabel("Title").fill("named");
  await page.getByLabel("Title").press("Enter");
  await choose(page, "drop", "Delete");
  await page.reload();
  await held.close();
  await ready(page);
  assert.deepEqual(await titles(page), ["named", "keep"]);
  assert.deepEqual(await unsaved(page), []);
  await page.getByRole("link", { name: "keep" }).click();
  await page.getByText("You said keep.").waitFor();
}));

test("Undo restores a conversation that another tab has removed from the database", () => withPage({}, async (page) => {
  await open(page);
  await echo(page);
  await start(page, "precious");
  await page.reload();
  await ready(page);
  await page.click("#new-chat");
  await choose(page, "precious", "Delete");
  const other = await page.context().newPage();
  await other.goto(`${url}/`);
  await ready(other);
  await other.close();
  await page.getByText("Undo").click();
  await page.getByRole("link", { name: "precious" }).click();
  await page.getByText("You said precious.").waitFor();
  await page.reload();
  await ready(page);
  await page.getByText("You said precious.").waitFor();
}));

test("an export in JSON, imported, has every branch", () => withPage({}, async (page) => {
  await open(page);
  await answerWith(page, (body, n) => [{ content: `answer ${n}` }]);
  await start(page, "question");
  await answer(page).getByLabel("Regenerate").click();
  await page.getByText("answer 2").waitFor();
  await settled(page);
  const download = page.waitForEvent("download");
  await choose(page, "question", "Export as JSON");
  const file = await (await download).path();
  assert.equal((await download).suggestedFilename(), "question.json");
  await choose(page, "question", "Delete");
  await page.setInputFiles("#import-file", { name: "question.json", mimeType: "application/json", buffer: await readFile(file) });
  await page.getByText("answer 2").waitFor();
  await page.getByLabel("Previous version").click();
  await page.getByText("answer 1").waitFor();
  await page.reload();
  await ready(page);
  await page.getByText("answer 1").waitFor();
  assert.deepEqual(await titles(page), ["question"]);
  for (const [text, fault] of [["{", /not JSON/], ['{"format": "other"}', /expected an export/],
    ['{"format": "moesaic.conversations", "version": 9, "conversations": []}', /version 9/],
    ['{"format": "moesaic.conversations", "version": 1, "conversations": [{"conversation": {}, "messages": [{"id": 1}]}]}', /conversations\[0\]\.messages\[0\]/]]) {
    await page.setInputFiles("#import-file", { name: "bad.json", mimeType: "application/json", buffer: Buffer.from(text) });
    await page.locator(".toast").filter({ hasText: fault }).waitFor();
  }
  assert.deepEqual(await titles(page), ["question"]);
}));

test("an imported file cannot run code", () => withPage({}, async (page, faults) => {
  await open(page);
  const evil = '<img src=x onerror="window.hit=1">';
  const message = (id, parent, role, more) => ({ id, parent, role, order: 0, content: evil, ...more });
  await page.setInputFiles("#import-file", { name: "evil.json", mimeType: "application/json", buffer: Buffer.from(JSON.stringify({
    format: "moesaic.conversations", version: 1, conversations: [{ conversation: { id: evil, title: evil, chosen: { root: "a", __proto__: { x: 1 } } }, messages: [
      message("a", null, "user"), message("b", "a", "assistant", { calls: [{ id: evil, name: evil, arguments: evil }], error: evil, reasoning: evil, status: evil, stats: { usage: evil } }),
      message("c", "b", "tool", { results: [{ id: evil, name: evil, content: evil }] }), message("d", "e", "user"), message("e", "d", "user")] }] })) });
  await page.locator(".turn.tool").waitFor();
  assert.equal(await page.evaluate(() => window.hit), undefined);
  assert.equal(await page.locator(".turn img, .conversation img").count(), 0);
  allowRefusals(faults);
}));

test("an export in Markdown is the branch that is shown", () => withPage({}, async (page) => {
  await open(page);
  await answerWith(page, (body, n) => n === 1 ? [{ content: "one\n```\ncode\n```" }]
    : [{ tool_calls: [{ index: 0, id: "c", function: { name: "look", arguments: '{"q": "```"}' } }] }]);
  await start(page, "What/is: this?");
  await ask(page, "Look!");
  const download = page.waitForEvent("download");
  await choose(page, "What/is: this?", "Export as Markdown");
  assert.equal((await download).suggestedFilename(), "What-is-this.md");
  const text = await readFile(await (await download).path(), "utf8");
  assert.equal(text, '# What/is: this?\n\n## You\n\nWhat/is: this?\n\n## Answer\n\none\n```\ncode\n```\n\n## You\n\nLook!\n\n## Answer\n\n' +
    'Call of `look`:\n\n````json\n{"q": "```"}\n````\n');
}));

test("all conversations are exported at once", () => withPage({}, async (page) => {
  await open(page);
  await echo(page);
  for (const text of ["a", "b"]) await start(page, text);
  const download = page.waitForEvent("download");
  await page.click("#list-menu");
  await page.getByRole("menuitem", { name: "Export all as JSON" }).click();
  const { conversations } = JSON.parse(await readFile(await (await download).path(), "utf8"));
  assert.deepEqual(conversations.map(({ conversation, messages }) => [conversation.title, messages.length]), [["b", 2], ["a", 2]]);
}));

test("other tabs show changes, and an answer continues while another conversation is open", () => withPage({}, async (page) => {
  await open(page);
  await echo(page);
  await start(page, "shared");
  const other = await page.context().newPage();
  await other.goto(page.url());
  await ready(other);
  await ask(page, "more");
  await other.getByText("You said more.").waitFor();
  await choose(page, "shared", "Rename");
  await page.getByLabel("Title").fill("renamed");
  await page.getByLabel("Title").press("Enter");
  await other.getByRole("link", { name: "renamed" }).waitFor();
  await other.close();

  let release;
  const held = new Promise((resolve) => { release = resolve; });
  await page.unroute(CHAT);
  await page.route(CHAT, async (route) => {
    await held;
    await route.fulfill({ contentType: "text/event-stream", body: 'data: {"choices":[{"index":0,"delta":{"content":"late"}}]}\n\ndata: [DONE]\n\n' });
  });
  await page.click("#new-chat");
  await send(page, "slow");
  await page.locator(".turn.pending").waitFor();
  await page.getByRole("link", { name: "renamed" }).click();
  await page.getByText("You said more.").waitFor();
  assert.ok(await page.locator("#send").isVisible(), "another conversation is not blocked");
  await page.locator(".conversation .running").waitFor();
  release();
  await page.locator(".conversation .running").waitFor({ state: "detached" });
  await page.getByRole("link", { name: "slow" }).click();
  await page.getByText("late").waitFor();
}));

test("a conversation that one tab deletes stays deleted when another tab continues it", () => withPage({}, async (page, faults) => {
  await open(page);
  await echo(page);
  await start(page, "shared");
  const other = await page.context().newPage();
  other.on("pageerror", (error) => faults.push(error.message));
  await other.goto(page.url());
  await ready(other);
  const { left } = await answerWithoutEnd(other);
  await send(other, "more");
  await other.locator(".turn.pending .prose").filter({ hasText: "word1" }).waitFor();
  await choose(page, "shared", "Delete");
  await other.getByText("What would you like to know?").waitFor();
  assert.match(other.url(), /#chat$/);
  await left;
  await page.getByText("Undo").click();
  await other.getByRole("link", { name: "shared" }).click();
  await other.getByText("You said shared.").waitFor();
  await choose(page, "shared", "Delete");
  await page.getByLabel("Dismiss").click();
  await other.getByText("What would you like to know?").waitFor();
  await echo(other);
  await ask(other, "alone");
  await other.reload();
  await ready(other);
  await other.getByText("You said alone.").waitFor();
  assert.deepEqual(await titles(other), ["alone"]);
  await page.getByRole("link", { name: "alone" }).waitFor();
  assert.deepEqual(await titles(page), ["alone"]);
  await page.waitForFunction(async () => {
    const database = await import(new URL("js/database.js", location.href));
    return (await database.getAll("conversations")).length === 1 && (await database.getAll("messages")).length === 2;
  });
}));

test("the keyboard reaches the list, its menus and the message", () => withPage({}, async (page) => {
  await open(page);
  await echo(page);
  await start(page, "by keys");
  await page.getByRole("link", { name: "by keys" }).focus();
  await page.keyboard.press("Tab");
  await page.keyboard.press("Enter");
  assert.equal(await page.evaluate(() => document.activeElement.innerText), "Rename");
  await page.keyboard.press("ArrowUp");
  assert.equal(await page.evaluate(() => document.activeElement.innerText), "Delete");
  await page.keyboard.press("Escape");
  assert.equal(await page.evaluate(() => document.activeElement.getAttribute("aria-label")), "Actions for by keys");
  const unnamed = await page.evaluate(() => [...document.querySelectorAll("button, input, textarea, a")].filter((node) => node.offsetParent &&
    !(node.getAttribute("aria-label") || node.innerText.trim() || node.labels?.length)).map((node) => node.outerHTML));
  assert.deepEqual(unnamed, []);
  await page.getByText("Skip to the message").focus();
  await page.keyboard.press("Enter");
  assert.equal(await page.evaluate(() => document.activeElement.id), "prompt");
  assert.equal(await page.locator(".turn").count(), 2, "the conversation stays open");
  assert.equal(await page.getAttribute("#tab-chat", "aria-current"), "page");
  await page.goto(`${url}/`);
  await ready(page);
  assert.equal(await page.evaluate(() => document.activeElement.id), "prompt");
}));
