// Converts TeX in Markdown, $x$, $$x$$, \(x\) and \[x\], to <code class="math">. KaTeX replaces it when it is loaded.
import { loadLibrary } from "./library.js";

const escapeHtml = (text) => text.replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);

// Dollars around text that begins or ends with a space, or before a letter or digit, are prices: "$5 to $10".
const INLINE = [
  [/^\$\$((?:\\.|[^\\$])+?)\$\$/, true],
  [/^\$((?!\s)(?:\\.|[^\\$\n])*?(?:\\.|[^\s\\$]))\$(?!\w)/, false],
  [/^\\\(((?:(?!\n\n)[^])+?)\\\)/, false],
  [/^\\\[((?:(?!\n\n)[^])+?)\\\]/, true],
];
const BLOCK = [/^ {0,3}\$\$((?:(?!\n\n)[^])+?)\$\$[ \t]*(?:\n|$)/, /^ {0,3}\\\[((?:(?!\n\n)[^])+?)\\\][ \t]*(?:\n|$)/];

const draw = ({ tex, display }) => `<code class="math${display ? " display" : ""}">${escapeHtml(tex)}</code>`;

/// Extensions of marked.
export const mathExtensions = [{
  name: "math",
  level: "inline",
  start: (source) => source.match(/\$|\\[([]/)?.index,
  tokenizer(source) {
    for (const [pattern, display] of INLINE) {
      const match = pattern.exec(source);
      if (match) return { type: "math", raw: match[0], tex: match[1].trim(), display };
    }
    return undefined;
  },
  renderer: draw,
}, {
  name: "mathBlock",
  level: "block",
  start: (source) => source.match(/(?:^|\n) {0,3}(?:\$\$|\\\[)/)?.index,
  tokenizer(source) {
    for (const pattern of BLOCK) {
      const match = pattern.exec(source);
      if (match) return { type: "mathBlock", raw: match[0], tex: match[1].trim(), display: true };
    }
    return undefined;
  },
  renderer: (token) => `<p>${draw(token)}</p>\n`,
}];

let katex = null;

function replace(code) {
  const node = document.createElement("span");
  const display = code.classList.contains("display");
  node.className = display ? "formula display" : "formula";
  try {
    // render() sets styles through the DOM, which a content security policy without inline styles allows.
    katex.render(code.textContent, node, { displayMode: display, throwOnError: true, trust: false, strict: "ignore", maxSize: 20, maxExpand: 500 });
    code.replaceWith(node);
  } catch (error) {
    code.title = error.message; // the source is not TeX and stays visible
    code.classList.remove("math");
  }
}

/// Renders the formulas in `root`. Skips nodes that are replaced before KaTeX is loaded.
export async function drawMath(root) {
  let codes = root.querySelectorAll("code.math");
  if (codes.length === 0) return;
  codes = [...codes];
  katex ??= await loadLibrary("katex", { globalName: "katex", styles: "katex.min.css" });
  for (const code of codes) replace(code);
}
