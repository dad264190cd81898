// Converts HTML of a model to nodes that cannot run code, load files of other servers, or imitate parts of the page.
import { loadLibrary } from "./library.js";
import { make } from "./dom.js";

const CONFIG = {
  ALLOWED_TAGS: ["a", "abbr", "b", "blockquote", "br", "code", "dd", "del", "details", "div", "dl", "dt", "em", "h1", "h2", "h3", "h4",
    "h5", "h6", "hr", "i", "img", "input", "ins", "kbd", "li", "mark", "ol", "p", "pre", "q", "s", "samp", "small", "span", "strong",
    "sub", "summary", "sup", "table", "tbody", "td", "tfoot", "th", "thead", "tr", "u", "ul", "var"],
  ALLOWED_ATTR: ["align", "alt", "checked", "class", "colspan", "disabled", "href", "open", "rowspan", "src", "start", "title", "type"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
const CLASSES = /^(language-[\w+#.-]+|math|display|hljs-[\w-]+|[\w-]+_)$/; // of Markdown, math and highlighting
const LINKS = /^(https?:|mailto:)/i;
const PICTURES = /^data:image\/(png|jpeg|gif|webp);base64,/i;

let purify = null;

export async function loadSanitizer() {
  purify = await loadLibrary("dompurify", { globalName: "DOMPurify" });
}

export function sanitize(html) {
  const fragment = purify.sanitize(html, CONFIG);
  for (const node of fragment.querySelectorAll("[class]")) {
    const kept = [...node.classList].filter((name) => CLASSES.test(name));
    if (kept.length) node.className = kept.join(" ");
    else node.removeAttribute("class");
  }
  for (const link of fragment.querySelectorAll("a")) {
    if (!LINKS.test(link.getAttribute("href") ?? "")) {
      link.replaceWith(...link.childNodes);
      continue;
    }
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const image of fragment.querySelectorAll("img")) {
    const source = image.getAttribute("src") ?? "";
    if (PICTURES.test(source)) continue;
    // Loading a picture from another server would reveal this conversation to it.
    const name = `Image: ${image.alt || source || "no address"}`;
    image.replaceWith(/^https?:/i.test(source)
      ? make("a", { href: source, target: "_blank", rel: "noopener noreferrer", title: "The picture is not loaded; the link opens it." }, name)
      : make("span", {}, name));
  }
  for (const input of fragment.querySelectorAll("input")) {
    if (input.type === "checkbox") input.disabled = true;
    else input.remove();
  }
  return fragment;
}
