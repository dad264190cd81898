// The open conversation. Shows the turns of its branch and updates them while answers grow.
import { byId, make } from "./dom.js";
import { EXAMPLES } from "./examples.js";
import { children } from "./tree.js";
import { makeTurn } from "./turn.js";

const LATE = 3000; // ms
const AT_END = 80; // px from the end within which the view follows a growing answer

export class Thread {
  #root = byId("thread");
  #chats;
  #answers;
  #turns = new Map(); // message id -> turn
  #drawing = 0;
  // Turns become higher when formulas and pictures are rendered late.
  #sizes = new ResizeObserver(() => { if (performance.now() - this.#drawn < LATE || this.#answering()) this.#follow(); });
  #drawn = 0; // time of the last drawing
  #follows = true; // true if the view follows the end
  #top = 0; // scroll position of the last scroll event, in px
  conversation = null;

  constructor(chats, answers, ask) {
    this.#chats = chats;
    this.#answers = answers;
    this.ask = ask;
    this.actions = {
      edit: (message, content) => this.#branchOff(message, { role: "user", content }),
      editResults: (message, results) => this.#branchOff(message, { role: "tool", results }),
      sendResults: async (message, results) => this.#send({ parent: message.id, role: "tool", results }),
      regenerate: (message) => this.#answerAgain(message),
      goOn: (message) => this.#answers.goOn(message),
      focusPrompt: () => byId("prompt").focus(),
    };
    for (const kind of ["start", "end"]) {
      answers.addEventListener(kind, ({ detail }) => { if (this.#shows(detail)) this.draw(); });
    }
    answers.addEventListener("grow", ({ detail }) => {
      if (this.#shows(detail)) this.#turns.get(detail.id)?.grow?.(() => this.#follow());
    });
    chats.addEventListener("messages", ({ detail }) => { if (detail === this.conversation?.id) this.draw(); });
    this.#root.addEventListener("scroll", () => {
      // Only a reader scrolls up. The end can also be far because the thread grew since the last scroll.
      const top = this.#root.scrollTop;
      if (this.#root.scrollHeight - top - this.#root.clientHeight < AT_END) this.#follows = true;
      else if (top < this.#top) this.#follows = false;
      this.#top = top;
      byId("to-end").hidden = this.#follows;
    });
    byId("to-end").addEventListener("click", () => this.scrollToEnd());
  }

  async open(conversation) {
    this.conversation = conversation;
    this.#turns.clear();
    this.#sizes.disconnect();
    this.#root.replaceChildren();
    await this.draw();
    this.scrollToEnd();
  }

  get lastUserTurn() {
    return [...this.#turns.values()].filter((turn) => turn.message.role === "user").at(-1);
  }

  async draw() {
    const drawing = ++this.#drawing;
    const { conversation } = this;
    const shown = conversation ? await this.#chats.branch(conversation.id) : [];
    if (drawing !== this.#drawing) return; // a later call draws instead
    if (shown.length === 0) {
      this.#drawEmpty();
      return;
    }
    const messages = await this.#chats.messages(conversation.id);
    if (drawing !== this.#drawing) return;
    const kept = new Set(shown.map((message) => message.id));
    for (const id of [...this.#turns.keys()]) if (!kept.has(id)) this.#turns.delete(id);
    const busy = this.#answers.runsIn(conversation.id);
    const elements = shown.map((message, i) => {
      if (!this.#turns.has(message.id)) this.#turns.set(message.id, makeTurn(message, this.actions));
      const turn = this.#turns.get(message.id);
      turn.update({
        siblings: children(messages, message.parent),
        show: (sibling) => {
          this.#chats.show(conversation, sibling);
          this.draw();
        },
        running: this.#answers.runs(message.id),
        elsewhere: this.#chats.streamsElsewhere(message) && !this.#answers.runs(message.id),
        busy,
        last: i === shown.length - 1,
      });
      return turn.element;
    });
    this.#place(elements);
    this.#drawn = performance.now();
    for (const element of elements) this.#sizes.observe(element);
    this.#follow();
  }

  scrollToEnd() {
    this.#follows = true;
    this.#follow();
  }

  // Replaces only nodes that differ, so that focus, selection and open details are preserved.
  #place(elements) {
    elements.forEach((element, i) => {
      const there = this.#root.children[i];
      if (there === element) return;
      if (there && !elements.includes(there)) there.replaceWith(element);
      else this.#root.insertBefore(element, there ?? null);
    });
    while (this.#root.children.length > elements.length) this.#root.lastElementChild.remove();
  }

  #follow() {
    if (this.#follows) this.#root.scrollTop = this.#root.scrollHeight;
    byId("to-end").hidden = this.#follows;
  }

  #answering() {
    return Boolean(this.conversation && this.#answers.runsIn(this.conversation.id));
  }

  #shows(message) {
    return message.conversation === this.conversation?.id;
  }

  #drawEmpty() {
    this.#turns.clear();
    this.#follows = true;
    byId("to-end").hidden = true;
    this.#root.replaceChildren(make("div", { class: "empty" },
      make("img", { src: "icon.svg", alt: "", width: 44, height: 44 }),
      make("h1", {}, "What would you like to know?"),
      make("div", { class: "examples" }, ...EXAMPLES.map((example) => (
        make("button", { type: "button", onclick: () => this.ask(example) }, example))))));
  }

  async #send(message) {
    const { conversation } = this;
    const added = await this.#chats.add(conversation, message);
    await this.#answers.answer(conversation, added);
  }

  // Adds a sibling of `message` and its answer.
  #branchOff(message, changed) {
    return this.#send({ parent: message.parent, ...changed });
  }

  async #answerAgain(message) {
    const parent = (await this.#chats.messages(message.conversation)).get(message.parent);
    if (parent) await this.#answers.answer(this.conversation, parent);
  }
}
