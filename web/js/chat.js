// The conversation: history, streaming with reasoning and tool calls, stop and regenerate.
import { streamChat } from "./api.js";
import { render } from "./markdown.js";

const byId = (id) => document.getElementById(id);
const STORE = "moesaic.chat";
const EXAMPLES = ["What is the capital of France?", "Write a short greeting for a friend.", "What is 7 + 5?"];

function node(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

/// One turn is {role, content, reasoning?, calls?, stats?, error?}; calls are {id, name, arguments}.
function toMessages(turns, system) {
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const turn of turns) {
    if (turn.error && !turn.content) continue;
    const message = { role: turn.role, content: turn.content };
    if (turn.calls?.length) {
      message.tool_calls = turn.calls.map((call) => (
        { id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
    }
    messages.push(message);
  }
  return messages;
}

function readOptions(model) {
  const body = { model };
  const number = (id, name) => {
    const value = parseFloat(byId(id).value);
    if (Number.isFinite(value)) body[name] = value;
  };
  number("temperature", "temperature");
  number("top-p", "top_p");
  number("max-tokens", "max_tokens");
  const tools = byId("tools").value.trim();
  if (tools) {
    try {
      body.tools = JSON.parse(tools);
    } catch (error) {
      throw new Error(`Tools: ${error.message}`);
    }
  }
  return body;
}

/// Adds what a chunk brings to `turn`.
function absorb(turn, chunk, started) {
  if (chunk.usage) turn.stats.usage = chunk.usage;
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta ?? {};
  if ((content || reasoning || calls) && turn.stats.first === undefined) turn.stats.first = performance.now() - started;
  if (content) turn.content += content;
  if (reasoning) turn.reasoning = (turn.reasoning ?? "") + reasoning;
  for (const part of calls ?? []) {
    turn.calls ??= [];
    const call = (turn.calls[part.index] ??= { id: "", name: "", arguments: "" });
    call.id = part.id ?? call.id;
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
  if (choice.finish_reason) turn.stats.finish = choice.finish_reason;
}

function prettyArguments(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // still streaming, or not JSON: shown as it is
  }
}

function describe(stats) {
  const { usage, first, total, finish } = stats;
  const parts = [];
  if (usage) {
    const seconds = (total - (first ?? 0)) / 1000;
    const measured = usage.completion_tokens > 1 && seconds > 0.05; // below that it is the network's speed
    const speed = measured ? (usage.completion_tokens - 1) / seconds : 0;
    parts.push(`${usage.completion_tokens} tokens`);
    if (speed) parts.push(`${speed.toFixed(speed < 100 ? 1 : 0)} tokens/s`);
    const cached = usage.prompt_tokens_details?.cached_tokens;
    parts.push(`prompt ${usage.prompt_tokens}${cached ? `, ${cached} cached` : ""}`);
  }
  if (first !== undefined) parts.push(`first token ${(first / 1000).toFixed(2)} s`);
  if (finish === "length") parts.push("cut at the token limit");
  return parts.join(" · ");
}

function drawTurn(turn, pending, actions) {
  const view = node("article", `turn ${turn.role}${pending ? " pending" : ""}`);
  if (turn.role === "user") {
    view.append(node("div", "text", turn.content));
    return view;
  }
  if (turn.reasoning) {
    const thought = node("details", "thought");
    thought.open = pending && !turn.content;
    thought.append(node("summary", "", pending && !turn.content ? "Thinking" : "Thoughts"), node("div", "", turn.reasoning));
    view.append(thought);
  }
  const text = node("div", "text");
  text.append(...render(turn.content));
  if (turn.content || pending) view.append(text);
  for (const call of turn.calls ?? []) {
    const card = node("section", "call");
    card.append(node("header", "", call.name), node("pre", "", prettyArguments(call.arguments)));
    view.append(card);
  }
  if (turn.error) view.append(node("p", "fault", turn.error));
  if (!pending) {
    const footer = node("footer");
    for (const [label, act] of actions) {
      const button = node("button", "quiet", label);
      button.type = "button";
      button.addEventListener("click", act);
      footer.append(button);
    }
    footer.append(node("span", "", describe(turn.stats ?? {})));
    view.append(footer);
  }
  return view;
}

export function startChat(findModel) {
  const thread = byId("thread");
  const prompt = byId("prompt");
  let turns = [];
  let running = null; // the AbortController of the answer that streams now

  try {
    turns = JSON.parse(sessionStorage.getItem(STORE)) ?? [];
  } catch { /* not ours: start anew */ }

  const save = () => sessionStorage.setItem(STORE, JSON.stringify(turns));

  function drawEmpty() {
    const empty = node("div", "empty");
    empty.append(node("h1", "", "What would you like to know?"));
    for (const example of EXAMPLES) {
      const button = node("button", "", example);
      button.type = "button";
      button.addEventListener("click", () => ask(example));
      empty.append(button);
    }
    thread.replaceChildren(empty);
  }

  function draw() {
    byId("stop").hidden = !running;
    byId("send").hidden = Boolean(running);
    if (!turns.length) return drawEmpty();
    const atEnd = thread.scrollHeight - thread.scrollTop - thread.clientHeight < 80;
    thread.replaceChildren(...turns.map((turn, i) => drawTurn(turn, Boolean(running) && i === turns.length - 1, [
      ["Copy", () => navigator.clipboard?.writeText(turn.content)],
      ...(i === turns.length - 1 ? [["Regenerate", regenerate]] : []),
    ])));
    if (atEnd) thread.scrollTop = thread.scrollHeight;
  }

  function drawLast() {
    const atEnd = thread.scrollHeight - thread.scrollTop - thread.clientHeight < 80;
    thread.lastElementChild?.replaceWith(drawTurn(turns.at(-1), true, []));
    if (atEnd) thread.scrollTop = thread.scrollHeight;
  }

  async function answer() {
    const turn = { role: "assistant", content: "", stats: {} };
    const history = toMessages(turns, byId("system").value.trim());
    turns.push(turn);
    running = new AbortController();
    draw();
    thread.scrollTop = thread.scrollHeight;
    const started = performance.now();
    let scheduled = false;
    try {
      const body = { ...readOptions(await findModel()), messages: history };
      await streamChat(body, running.signal, (chunk) => {
        absorb(turn, chunk, started);
        if (scheduled) return;
        scheduled = true;
        requestAnimationFrame(() => {
          scheduled = false;
          if (running) drawLast();
        });
      });
    } catch (error) {
      if (error.name !== "AbortError") turn.error = error.message;
    }
    turn.stats.total = performance.now() - started;
    running = null;
    save();
    draw();
    prompt.focus();
  }

  function ask(text) {
    if (running || !text.trim()) return;
    turns.push({ role: "user", content: text.trim() });
    prompt.value = "";
    resize();
    answer();
  }

  function regenerate() {
    if (running) return;
    while (turns.length && turns.at(-1).role === "assistant") turns.pop();
    if (turns.length) answer();
  }

  function resize() {
    prompt.style.height = "auto";
    prompt.style.height = `${prompt.scrollHeight}px`;
  }

  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    ask(prompt.value);
  });
  prompt.addEventListener("input", resize);
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      ask(prompt.value);
    }
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("clear").addEventListener("click", () => {
    running?.abort();
    turns = [];
    save();
    draw();
    prompt.focus();
  });
  byId("open-settings").addEventListener("click", (event) => {
    const settings = byId("settings");
    settings.hidden = !settings.hidden;
    event.currentTarget.setAttribute("aria-expanded", String(!settings.hidden));
  });
  draw();
}
