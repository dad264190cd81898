// Renders a growing Markdown text. Complete blocks are rendered once, and an update renders the last block only.
import { codeBlock, loadHighlighter } from "./code.js";
import { make } from "./dom.js";
import { hasLibraries, loadLibrary } from "./library.js";
import { drawMath, mathExtensions } from "./math.js";
import { loadSanitizer, sanitize } from "./sanitize.js";

let marked = null;

/// Loads the libraries. Where this fails, texts are shown without formatting.
export async function loadMarkdown() {
  if (!hasLibraries) return;
  const [module] = await Promise.all([loadLibrary("marked"), loadSanitizer(), loadHighlighter()]);
  marked = new module.Marked({ gfm: true, breaks: true });
  marked.use({ extensions: mathExtensions });
}

function draw(tokens, open) {
  const fragment = sanitize(marked.parser(tokens));
  for (const pre of fragment.querySelectorAll("pre")) {
    const language = /language-(\S+)/.exec(pre.querySelector("code")?.className ?? "")?.[1] ?? "";
    pre.replaceWith(codeBlock(pre.textContent.replace(/\n$/, ""), language, !open));
  }
  for (const table of fragment.querySelectorAll("table")) {
    const scroll = make("div", { class: "scroll", tabIndex: 0 });
    table.replaceWith(scroll);
    scroll.append(table);
  }
  return fragment;
}

const OPEN_FENCE = /^(`{3,}|~{3,})([^\n]*)\n/;

export class MarkdownView {
  #root;
  #blocks = []; // {raw, node} of complete blocks, in order
  #length = 0; // length of the source of these blocks
  #tail = null; // node of the block that still grows
  #finished = false;
  #fence = null; // {close, code, text, seen} of the last block if it is an open fence
  #plain = false; // true if the text cannot be rendered

  constructor(root) {
    this.#root = root;
  }

  /// Renders `source`, which begins with the source of the last call. `done` is true if the text is complete.
  update(source, done) {
    if (marked && !this.#plain) {
      try {
        this.#render(source, done);
        return;
      } catch (error) { // thousands of nested quotes or lists exceed the stack of the lexer
        this.#plain = true;
        console.warn("An answer is shown as plain text:", error);
      }
    }
    this.#root.textContent = source;
    this.#root.classList.add("plain");
  }

  #render(source, done) {
    if (source.includes("\r")) source = source.replace(/\r\n?/g, "\n"); // the lexer counts one character for CR LF
    if (done) return this.#finish(source);
    if (this.#finished) this.#restart(); // the answer continues, possibly without its trailing spaces
    if (this.#fence && this.#growFence(source)) return;
    this.#fence = null;
    const tail = source.slice(this.#length);
    const tokens = marked.lexer(tail);
    // Only a complete line shows if it belongs to the block above it.
    const certain = tail.lastIndexOf("\n") + 1;
    const starts = [];
    let at = 0;
    for (const token of tokens) {
      starts.push(at);
      at += token.raw.length;
    }
    let last = tokens.length - 1;
    while (last > 0 && (tokens[last].type === "space" || starts[last] + tokens[last].raw.split("\n", 1)[0].length >= certain)) --last;
    this.#tail?.remove();
    for (const token of tokens.slice(0, Math.max(0, last))) this.#append(token);
    this.#drawTail(tokens.slice(Math.max(0, last)), source);
  }

  #append(token) {
    this.#length += token.raw.length;
    if (token.type === "space" && this.#blocks.length) {
      this.#blocks.at(-1).raw += token.raw;
      return;
    }
    const node = make("div", { class: "block" }, draw([token], false));
    this.#blocks.push({ raw: token.raw, node });
    this.#root.append(node);
    drawMath(node);
  }

  #drawTail(tokens, source) {
    this.#tail = make("div", { class: "block" });
    const only = tokens.filter((token) => token.type !== "space");
    const fence = only.length === 1 && only[0].type === "code" && OPEN_FENCE.exec(only[0].raw);
    const close = fence && new RegExp(`\\n {0,3}${fence[1][0]}{${fence[1].length},}[ \\t]*(?:\\n|$)`);
    if (fence && !close.test(only[0].raw.slice(fence[0].length - 1))) {
      const block = codeBlock("", fence[2].trim().split(/\s/, 1)[0]);
      const text = document.createTextNode(source.slice(this.#length + fence[0].length));
      block.querySelector("code").append(text);
      this.#tail.append(block);
      this.#fence = { close, text, seen: source.length };
    } else {
      this.#tail.append(draw(tokens, true));
      drawMath(this.#tail);
    }
    this.#root.append(this.#tail);
  }

  // Appends the new text to the open fence. Returns false if the text may close it.
  #growFence(source) {
    const { close, text, seen } = this.#fence;
    const line = source.lastIndexOf("\n", seen - 1); // a part of the closing line may have arrived before
    if (close.test(source.slice(Math.max(0, line)))) return false;
    text.appendData(source.slice(seen));
    this.#fence.seen = source.length;
    return true;
  }

  #restart() {
    this.#root.replaceChildren();
    this.#blocks = [];
    this.#length = 0;
    this.#finished = false;
  }

  // Renders the whole text at once, since link definitions apply everywhere and HTML may span blocks.
  #finish(source) {
    const tokens = marked.lexer(source);
    this.#tail?.remove();
    this.#tail = this.#fence = null;
    const spans = tokens.some((token) => token.type === "html" || token.type === "def");
    const groups = spans ? [tokens] : [];
    if (!spans) {
      for (const token of tokens) {
        if (token.type === "space" && groups.length) groups.at(-1).push(token);
        else groups.push([token]);
      }
    }
    let kept = 0;
    const raws = groups.map((group) => group.map((token) => token.raw).join(""));
    while (kept < this.#blocks.length && this.#blocks[kept].raw === raws[kept]) ++kept;
    for (const { node } of this.#blocks.splice(kept)) node.remove();
    groups.slice(kept).forEach((group, i) => {
      const node = make("div", { class: "block" }, draw(group, false));
      this.#blocks.push({ raw: raws[kept + i], node });
      this.#root.append(node);
      drawMath(node);
    });
    this.#finished = true;
  }
}

