// Draws one message of the thread. Each kind has an `element`, and `update` draws it again. An answer also has `grow`.
import { button, copyButton, fitHeight, make } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { callCard, resultForm } from "./tool_call.js";

/// Creates arrows between the siblings of a message, "< 1 / 2 >". Returns null for an only child.
function siblingArrows(message, { siblings, show }) {
  if (siblings.length < 2) return null;
  const at = siblings.indexOf(message);
  return make("span", { class: "siblings", role: "group", "aria-label": "Versions of this message" },
    button("left", { label: "Previous version", disabled: at === 0, onclick: () => show(siblings[at - 1]) }),
    make("span", { class: "count" }, `${at + 1} / ${siblings.length}`),
    button("right", { label: "Next version", disabled: at === siblings.length - 1, onclick: () => show(siblings[at + 1]) }));
}

/// Creates a text area in place of a message. `send` gets the new text.
function editor(text, label, send, cancel) {
  const area = make("textarea", { value: text, "aria-label": label, rows: 1, oninput: () => fitHeight(area) });
  const form = make("form", { class: "editor", onsubmit: (event) => {
    event.preventDefault();
    if (area.value.trim()) send(area.value.trim());
  } }, area, make("div", { class: "row" },
    make("span", { class: "hint" }, "The earlier version is kept as a branch."),
    make("button", { type: "button", class: "quiet", onclick: cancel }, "Cancel"),
    make("button", { type: "submit", class: "primary" }, "Send")));
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      cancel();
    } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  queueMicrotask(() => {
    fitHeight(area);
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  });
  return form;
}

/// A message that can be edited in place. Subclasses return its nodes from `show`, its text from `copied`, and the form
/// that edits it from `form(close)`.
class EditableTurn {
  #editing = false;

  constructor(message, actions, { kind, label }) {
    this.message = message;
    this.actions = actions;
    this.element = make("article", { class: `turn ${kind}`, "aria-label": label });
  }

  update(context) {
    this.context = context;
    if (this.#editing) return;
    this.element.replaceChildren(...this.show(), make("footer", {}, siblingArrows(this.message, context),
      copyButton(() => this.copied()),
      button("edit", { label: "Edit", disabled: context.busy, onclick: () => this.edit() })));
  }

  edit() {
    this.#editing = true;
    this.element.replaceChildren(this.form(() => {
      this.#editing = false;
      this.update(this.context);
    }));
  }
}

export class UserTurn extends EditableTurn {
  constructor(message, actions) {
    super(message, actions, { kind: "user", label: "You" });
  }

  show() {
    return [make("div", { class: "prose" }, this.message.content)];
  }

  copied() {
    return this.message.content;
  }

  form(close) {
    return editor(this.message.content, "Edited message", (text) => {
      close();
      this.actions.edit(this.message, text);
    }, () => {
      close();
      this.actions.focusPrompt();
    });
  }
}

// Finish reasons of answers that can be continued.
const CUTS = new Map([["length", "cut at the token limit"], ["deadline", "cut at the server's time limit"]]);

function describe({ usage, first, total, finish, earlier }) {
  const parts = [];
  if (usage) {
    const seconds = (total - (first ?? 0)) / 1000;
    const measured = usage.completion_tokens > 1 && seconds > 0.05; // a shorter time measures the network
    parts.push(`${usage.completion_tokens + (earlier ?? 0)} tokens`);
    if (measured) {
      const speed = (usage.completion_tokens - 1) / seconds;
      parts.push(`${speed.toFixed(speed < 100 ? 1 : 0)} tokens/s`);
    }
    const cached = usage.prompt_tokens_details?.cached_tokens;
    parts.push(`prompt ${usage.prompt_tokens}${cached ? `, ${cached} cached` : ""}`);
  }
  if (first !== undefined) parts.push(`first token ${(first / 1000).toFixed(2)} s`);
  if (CUTS.has(finish)) parts.push(CUTS.get(finish));
  return parts.join(" · ");
}

const MARKS = { stopped: "Stopped", interrupted: "Interrupted", elsewhere: "Streaming in another tab" };

export class AnswerTurn {
  element = make("article", { class: "turn assistant", "aria-label": "Answer" });
  #thought = make("details", { class: "thought", hidden: true });
  #thoughtTitle = make("summary");
  #thoughtText = make("div");
  #text = make("div", { class: "prose" });
  #calls = make("div");
  #foot = make("footer");
  #mark = make("p", { class: "mark", hidden: true });
  #fault = make("p", { class: "fault", role: "alert", hidden: true });
  #view = new MarkdownView(this.#text);
  #drawn = ""; // state of the text at the last drawing
  #thinking = null;
  #timer = 0;

  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.#thought.append(this.#thoughtTitle, this.#thoughtText);
    this.element.append(this.#thought, this.#text, this.#calls, this.#mark, this.#fault, this.#foot);
  }

  /// Draws the whole answer. `context` is {siblings, show, running, elsewhere, busy, last, results}.
  update(context) {
    this.context = context;
    const { message } = this;
    const growing = context.running || context.elsewhere;
    const status = context.elsewhere ? "elsewhere" : message.status === "streaming" && !context.running ? "interrupted" : message.status;
    this.element.dataset.status = status;
    this.element.classList.toggle("pending", context.running);
    this.#draw(!growing);
    if (!growing) this.#drawCalls();
    const cut = status === "interrupted" || status === "stopped" || status === "failed";
    this.#mark.hidden = !MARKS[status];
    this.#mark.textContent = MARKS[status] ?? "";
    this.#fault.hidden = !message.error;
    this.#fault.textContent = message.error ?? "";
    this.#foot.hidden = context.running;
    const canGoOn = message.content && !message.calls?.length && context.last && (cut || CUTS.has(message.stats?.finish));
    this.#foot.replaceChildren(...[
      siblingArrows(message, context),
      message.content ? copyButton(() => message.content) : null,
      canGoOn ? button("forward", { text: "Continue", disabled: context.busy, onclick: () => this.actions.goOn(message) }) : null,
      button("retry", { label: "Regenerate", text: cut ? "Regenerate" : undefined, disabled: context.busy,
        onclick: () => this.actions.regenerate(message) }),
      make("span", { class: "stats" }, describe(message.stats ?? {})),
    ].filter(Boolean));
  }

  /// Draws new text soon. The interval grows with the time of a drawing, so that long answers draw less often.
  grow(afterwards) {
    if (this.#timer) return;
    this.#timer = requestAnimationFrame(() => {
      this.#timer = 0;
      if (!this.context.running) return; // the answer has ended, and was drawn as a whole
      const start = performance.now();
      this.#draw(false);
      afterwards();
      this.#timer = setTimeout(() => {
        this.#timer = 0;
        if (this.context.running && this.#drawn !== this.#state()) this.grow(afterwards);
      }, 4 * (performance.now() - start));
    });
  }

  #state() {
    return `${this.message.content.length} ${this.message.reasoning?.length}`;
  }

  #draw(done) {
    const { content, reasoning, calls } = this.message;
    const state = this.#state() + (done ? " done" : "");
    if (this.#drawn !== state) {
      this.#drawn = state;
      this.#view.update(content, done);
      const thinking = !done && !content;
      if (this.#thinking !== thinking) this.#thought.open = thinking; // the reasoning folds when the answer begins
      this.#thinking = thinking;
      this.#thought.hidden = !reasoning;
      this.#thoughtTitle.textContent = thinking ? "Thinking" : "Thoughts";
      this.#thoughtText.textContent = reasoning ?? "";
    }
    this.#text.hidden = done && !content;
    if (!done && calls?.length) this.#drawCalls();
  }

  #drawCalls() {
    const { calls } = this.message;
    if (!calls?.length) return;
    this.#calls.replaceChildren(...calls.map((call) => callCard(call)));
    if (this.context.last && !this.context.running && !this.context.elsewhere) {
      this.#calls.append(resultForm(calls, (results) => this.actions.sendResults(this.message, results)));
    }
  }
}

export class ToolTurn extends EditableTurn {
  constructor(message, actions) {
    super(message, actions, { kind: "tool", label: "Results of tools" });
  }

  show() {
    return this.message.results.map(({ name, content }) => make("section", { class: "call result" },
      make("header", {}, `Result of ${name}`), make("pre", { tabIndex: 0 }, content)));
  }

  copied() {
    return this.message.results.map((result) => result.content).join("\n");
  }

  form(close) {
    return resultForm(this.message.results, (results) => {
      close();
      this.actions.editResults(this.message, results);
    }, close);
  }
}

export function makeTurn(message, actions) {
  if (message.role === "user") return new UserTurn(message, actions);
  return message.role === "tool" ? new ToolTurn(message, actions) : new AnswerTurn(message, actions);
}
