// Builds code blocks with a language, a copy button and highlighting.
import { copyButton, make } from "./dom.js";
import { loadLibrary } from "./library.js";
import { sanitize } from "./sanitize.js";

const MOST_HIGHLIGHTED = 50000; // characters; longer code is not highlighted
let highlighter = null;

export async function loadHighlighter() {
  highlighter = await loadLibrary("highlight");
}

/// Sets the text of `code`, highlighted as `language` if that is known.
function fillCode(code, text, language) {
  if (highlighter?.getLanguage(language) && text.length <= MOST_HIGHLIGHTED) {
    code.replaceChildren(sanitize(highlighter.highlight(text, { language, ignoreIllegals: true }).value));
  } else {
    code.textContent = text;
  }
}

/// Returns a block of code with a head line. Pass no `highlight` while the code still grows.
export function codeBlock(text, language = "", highlight = true) {
  const code = make("code");
  if (highlight) fillCode(code, text, language);
  else code.textContent = text;
  return make("div", { class: "code" },
    make("div", { class: "code-head" }, make("span", {}, language || "text"), copyButton(() => code.textContent)),
    make("pre", { tabIndex: 0 }, code));
}
