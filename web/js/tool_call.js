// Shows calls of tools and the form for their results.
import { codeBlock } from "./code.js";
import { fitHeight, icon, make } from "./dom.js";

function prettyJson(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // incomplete, or no JSON
  }
}

export function callCard(call) {
  const block = codeBlock(prettyJson(call.arguments), "json");
  block.querySelector(".code-head").firstChild.textContent = "arguments";
  return make("section", { class: "call", "aria-label": `Call of ${call.name}` },
    make("header", {}, icon("tool"), make("span", {}, call.name)), block);
}

/// Creates a form with a field for each of `calls`, which may have a `content` already. `send` gets [{id, name, content}].
export function resultForm(calls, send, cancel) {
  const fields = calls.map((call) => {
    const area = make("textarea", { rows: 2, value: call.content ?? "", required: true, spellcheck: false,
      placeholder: 'Text or JSON, for example {"temperature": 21}', oninput: () => fitHeight(area) });
    area.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    return area;
  });
  const form = make("form", { class: "results", onsubmit: (event) => {
    event.preventDefault();
    send(calls.map(({ id, name }, i) => ({ id, name, content: fields[i].value })));
  } }, ...calls.map((call, i) => make("label", {}, `Result of ${call.name}`, fields[i])),
  make("div", { class: "row" },
    cancel ? make("button", { type: "button", class: "quiet", onclick: cancel }, "Cancel") : null,
    make("button", { type: "submit", class: "primary" }, calls.length > 1 ? "Send results" : "Send result")));
  return form;
}
