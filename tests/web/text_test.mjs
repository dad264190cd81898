// Tests formatted answers: GitHub's Markdown, code, math, and the removal of harmful HTML.
import assert from "node:assert/strict";
import test from "node:test";
import { ON_PHONE, allowRefusals, answer, answerWith, ask, noSidewaysScroll, open, ready, shot, url, withPage } from "./browser.mjs";

const RICH = `# Sorting

Use **sorted** with a *key*, not ~~cmp~~ \`cmp_to_key\`. See [the guide](https://docs.python.org/3/howto/sorting.html).

1. First
   - nested
     1. deep
2. Second
   - [x] done
   - [ ] open

> A quote
>
> > in a quote

| Algorithm | Worst | Stable |
|:--|--:|:-:|
| Timsort | $O(n \\log n)$ | yes |
| Quicksort | \\(O(n^2)\\) | no |

\`\`\`python
def f(x):  # a comment
    return {"a": 1, "b": 'two'}
\`\`\`

$$
\\int_0^\\infty e^{-x^2}\\,dx = \\frac{\\sqrt{\\pi}}{2}
$$

It costs $5 to $10, and \\[x = 1\\] holds.
`;

const show = async (page, text) => {
  await answerWith(page, () => [{ content: text }]);
  await ask(page, "Go!");
  return answer(page).locator(".prose");
};

for (const [name, options] of [["light", {}], ["dark", { colorScheme: "dark" }], ["phone", { ...ON_PHONE, colorScheme: "dark" }]]) {
  test(`Markdown, code and math are drawn: ${name}`, () => withPage(options, async (page) => {
    await open(page);
    const text = await show(page, RICH);
    await text.locator(".katex").first().waitFor();
    await noSidewaysScroll(page);
    await page.evaluate(() => document.fonts.ready);
    await page.waitForFunction(() => {
      const thread = document.getElementById("thread");
      return thread.scrollHeight - thread.scrollTop - thread.clientHeight < 2;
    });
    await shot(page, `text-${name}`);
    await page.evaluate(() => document.getElementById("thread").scrollTo(0, 0));
    await shot(page, `text-top-${name}`);
  }));
}

test("each kind of Markdown has its element", () => withPage({}, async (page) => {
  await open(page);
  const text = await show(page, RICH);
  await text.locator(".katex").first().waitFor();
  assert.equal(await text.locator("h1").innerText(), "Sorting");
  assert.equal(await text.locator("strong").innerText(), "sorted");
  assert.equal(await text.locator("em").innerText(), "key");
  assert.equal(await text.locator("del").innerText(), "cmp");
  assert.equal(await text.locator("p > code").innerText(), "cmp_to_key");
  assert.equal(await text.locator("ol > li > ul > li > ol > li").innerText(), "deep");
  assert.deepEqual(await text.locator("input[type=checkbox]").evaluateAll((all) => all.map((one) => [one.checked, one.disabled])), [[true, true], [false, true]]);
  assert.equal(await text.locator("blockquote blockquote").innerText(), "in a quote");
  assert.equal(await text.locator(".scroll table tbody tr").count(), 2);
  assert.equal(await text.locator("th").nth(1).evaluate((cell) => getComputedStyle(cell).textAlign), "right");
  const link = text.locator("a");
  assert.deepEqual([await link.getAttribute("rel"), await link.getAttribute("target")], ["noopener noreferrer", "_blank"]);
  assert.equal(await text.locator(".formula").count(), 4);
  assert.equal(await text.locator(".katex-display").count(), 2);
  assert.match(await text.innerText(), /It costs \$5 to \$10, and/);
  const face = await page.evaluate(async () => (await document.fonts.load("16px KaTeX_Main")).length);
  assert.equal(face, 1, "the fonts of formulas come from the server");
}));

test("late formulas at the end of an answer stay in view", () => withPage({}, async (page) => {
  await open(page);
  await page.waitForFunction(() => performance.now() > 5000);
  await page.evaluate(() => { // like a formula whose library is loaded late
    const observer = new MutationObserver(() => {
      const turn = document.querySelector(".turn.assistant:last-child:not(.pending)");
      if (!turn?.querySelector("footer")) return;
      observer.disconnect();
      setTimeout(() => { turn.style.minHeight = "4000px"; }, 100);
    });
    observer.observe(document.getElementById("thread"), { childList: true, subtree: true, attributes: true });
  });
  await show(page, RICH);
  await page.waitForFunction(() => {
    const thread = document.getElementById("thread");
    return thread.scrollHeight > 4000 && thread.scrollHeight - thread.scrollTop - thread.clientHeight < 2;
  });
}));

test("code is highlighted and copied", () => withPage({ permissions: ["clipboard-read", "clipboard-write"] }, async (page) => {
  await open(page);
  const text = await show(page, RICH);
  const code = text.locator(".code");
  assert.equal(await code.locator(".code-head span").first().innerText(), "python");
  assert.equal(await code.locator(".hljs-keyword").first().innerText(), "def");
  assert.equal(await code.locator(".hljs-comment").innerText(), "# a comment");
  await code.getByLabel("Copy").click();
  await code.locator(".confirmed").waitFor();
  assert.equal(await page.evaluate(() => navigator.clipboard.readText()), 'def f(x):  # a comment\n    return {"a": 1, "b": \'two\'}');
}));

const ATTACKS = {
  "a script": "<script>window.hit = 1</script>",
  "an event handler": '<img src="x" onerror="window.hit = 1">',
  "an event handler of a block": '<div onclick="window.hit = 1" onmouseover="window.hit = 1">hover</div>',
  "a link to script": "[click](javascript:window.hit=1)",
  "a link to script in HTML": '<a href="jAvAscript:window.hit=1">click</a> <a href="data:text/html,<script>window.hit=1</script>">data</a>',
  "SVG with script": '<svg onload="window.hit = 1"><script>window.hit = 1</script></svg>',
  "SVG as data": `![x](data:image/svg+xml;base64,${Buffer.from('<svg xmlns="http://www.w3.org/2000/svg" onload="window.hit=1"/>').toString("base64")})`,
  "styles": "<style>body { display: none }</style><p style='position:fixed;inset:0'>cover</p>",
  "a picture from elsewhere": "![a cat](http://192.0.2.1/cat.png) <img src='http://192.0.2.1/dog.png'>",
  "an embedded page": "<iframe src='http://192.0.2.1/'></iframe><object data='http://192.0.2.1/'></object><embed src='http://192.0.2.1/'>",
  "a form": "<form action='http://192.0.2.1/'><input name=key><button>Send</button></form>",
  "names of the page's own elements": '<p id="prompt" name="prompt" class="fault quiet">fake</p>',
  "MathML": "<math><mtext><table><mglyph><style><!--</style><img title=\"--&gt;&lt;img src=1 onerror=window.hit=1&gt;\">",
  "script in TeX": "$\\href{javascript:window.hit=1}{x}$ and $\\htmlData{a=b}{x}$ and $\\includegraphics{http://192.0.2.1/a.png}$",
  "script in a code language": "```\"><img/src=x/onerror=window.hit=1>\ncode\n```",
  "a meta refresh": '<meta http-equiv="refresh" content="0; url=http://192.0.2.1/"><base href="http://192.0.2.1/"><link rel=stylesheet href="http://192.0.2.1/a.css">',
};

test("text of a model cannot run code, load files or imitate the page", () => withPage({}, async (page, faults) => {
  const elsewhere = [];
  page.on("request", (request) => { if (!request.url().startsWith(url) && !request.url().startsWith("data:") && !request.url().startsWith("blob:")) elsewhere.push(request.url()); });
  await open(page);
  await answerWith(page, (body) => [{ content: `${ATTACKS[body.messages.at(-1).content]}\n\nend` }]);
  for (const name of Object.keys(ATTACKS)) {
    await ask(page, name);
    const text = answer(page).locator(".prose");
    await text.getByText("end").first().waitFor();
    for (const link of await text.locator("a").all()) await link.hover();
    const found = await text.evaluate((root) => [...root.querySelectorAll("*")].flatMap((node) => [
      ...(/^(script|style|iframe|object|embed|form|svg|math|meta|base|link|button|textarea)$/i.test(node.tagName) &&
        !node.closest(".formula, .code-head") ? [node.tagName] : []),
      ...[...node.attributes].filter(({ name: attribute, value }) => /^on|^(style|id|name|action|srcset|formaction)$/i.test(attribute) && !node.closest(".formula, .code-head") ||
        /^(href|src)$/.test(attribute) && !/^(https?:|mailto:|data:image\/(png|jpeg|gif|webp);)/.test(value) ||
        attribute === "src" && !value.startsWith("data:")).map((attribute) => `${attribute.name}=${attribute.value}`),
    ]));
    assert.deepEqual(found, [], name);
    assert.equal(await text.locator(".fault, .quiet:not(.code-head *)").count(), 0, name);
  }
  assert.equal(await page.evaluate(() => window.hit), undefined);
  assert.deepEqual(elsewhere, []);
  assert.equal(await page.locator("#prompt").count(), 1);
  await page.getByText("Image: a cat").waitFor();
  allowRefusals(faults);
  await shot(page, "attacks");
}));

test("text that the lexer cannot nest is shown as plain text, also after a reload", () => withPage({}, async (page) => {
  await open(page);
  const deep = `${">".repeat(20000)} deep`;
  const text = await show(page, deep);
  assert.equal(await text.innerText(), deep);
  await page.reload();
  await ready(page);
  assert.equal(await answer(page).locator(".prose").innerText(), deep);
  assert.equal(await page.locator(".turn").count(), 2);
}));

test("user text stays text", () => withPage({}, async (page) => {
  await open(page);
  await answerWith(page, () => [{ content: "ok" }]);
  await ask(page, "<img src=x onerror=window.hit=1> **not bold** <b>x</b>");
  assert.equal(await page.locator(".turn.user .prose").innerText(), "<img src=x onerror=window.hit=1> **not bold** <b>x</b>");
  assert.equal(await page.locator(".conversation img, .conversation b").count(), 0);
}));

test("a growing text is rendered like the whole text, and each block once", () => withPage({}, async (page) => {
  await open(page);
  const texts = {
    rich: RICH,
    lists: "- a\n\n- b\n\n  more of b\n- c\n#tag\n\n1. x\n2. y\n\nend\n===\n\n* * *\nlast",
    fence: "Before\n\n````md\n```js\nlet x = 1;\n```\nstill inside\n````\n\nAfter ```not a fence``` this\n\n```\nnever closed\n\nmore",
    html: "<details><summary>More</summary>\n\n**inside**\n\n</details>\n\nA [link][1].\n\n[1]: https://example.org/\n",
    table: "|a|b|\n|-|-|\n|1|2|\n|3|4|\n\ntext\r\nwith returns\r\n\r\n- x\r\n- y\r\n",
  };
  for (const [name, text] of Object.entries(texts)) {
    for (const step of [1, 3, 17]) {
      const [grown, whole] = await page.evaluate(async ([source, by]) => {
        const { MarkdownView } = await import(new URL("js/markdown.js", location.href));
        const roots = [0, 1].map(() => document.createElement("div"));
        const view = new MarkdownView(roots[0]);
        for (let end = 1; end < source.length; end += by) view.update(source.slice(0, end), false);
        view.update(source, true);
        new MarkdownView(roots[1]).update(source, true);
        await new Promise((resolve) => { setTimeout(resolve, 50); });
        return roots.map((root) => root.innerHTML);
      }, [text, step]);
      assert.equal(grown, whole, `${name} in steps of ${step}`);
    }
  }
  // A text that continues after its end is rendered as one text too.
  const [resumed, whole] = await page.evaluate(async () => {
    const { MarkdownView } = await import(new URL("js/markdown.js", location.href));
    const roots = [0, 1].map(() => document.createElement("div"));
    const view = new MarkdownView(roots[0]);
    view.update("One **two** three  ", true);
    view.update("One **two** three four.\n\nN", false);
    new MarkdownView(roots[1]).update("One **two** three four.\n\nN", false);
    return roots.map((root) => root.innerHTML);
  });
  assert.equal(resumed, whole);
  // The number of nodes created for a text of n paragraphs, in steps of a few characters, is linear in n.
  const made = await page.evaluate(async () => {
    const { MarkdownView } = await import(new URL("js/markdown.js", location.href));
    const count = async (source) => {
      const root = document.createElement("div");
      let nodes = 0;
      const observer = new MutationObserver((records) => {
        for (const record of records) for (const node of record.addedNodes) nodes += 1 + (node.querySelectorAll?.("*").length ?? 0);
      });
      observer.observe(root, { childList: true, subtree: true });
      const view = new MarkdownView(root);
      for (let end = 1; end < source.length; end += 8) view.update(source.slice(0, end), false);
      view.update(source, true);
      await new Promise((resolve) => { setTimeout(resolve); });
      return nodes;
    };
    const paragraphs = (n) => Array.from({ length: n }, (_, i) => `Paragraph ${i} with **bold** text and \`code\`.`).join("\n\n");
    const code = (n) => `\`\`\`\n${"let x = 1;\n".repeat(n)}`;
    return [[await count(paragraphs(20)), await count(paragraphs(160))], [await count(code(40)), await count(code(320))]];
  });
  assert.ok(made[0][1] < made[0][0] * 12, `paragraphs: ${made[0]} nodes for 8 times the text`);
  assert.ok(made[1][1] < made[1][0] * 2, `code: ${made[1]} nodes for 8 times the text`);
}));

test("without its libraries the page shows plain text and a notice", () => withPage({}, async (page) => {
  await page.route("**/js/libraries.js", (route) => route.fulfill({ contentType: "text/javascript", body: "export const libraries = null;" }));
  await open(page);
  const text = await show(page, "# Title\n<img src=x onerror=window.hit=1> **bold**");
  assert.equal(await text.innerText(), "# Title\n<img src=x onerror=window.hit=1> **bold**");
  assert.match(await page.locator("#notice").innerText(), /without formatting/);
  await shot(page, "plain");
  await page.click("#tab-operations");
  await page.locator(".tile").first().waitFor();
  assert.equal(await page.locator("#charts-panel").isVisible(), false);
  await page.locator("#requests-caption").waitFor();
}));
