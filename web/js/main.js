// Starts the page and connects its parts.
import { Answers } from "./answers.js";
import { getModels, keys } from "./api.js";
import { Chats } from "./chats.js";
import { Composer } from "./composer.js";
import { byId, fillIcons } from "./dom.js";
import { hasLibraries } from "./library.js";
import { loadMarkdown } from "./markdown.js";
import { Operations } from "./operations.js";
import { Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { Thread } from "./thread.js";
import { announce, toast } from "./toast.js";

fillIcons();

const settings = new Settings(() => {
  findModel().catch(showFault);
  operations.retry();
});
const chats = new Chats();
const answers = new Answers(chats, findModel, () => settings.values);
const thread = new Thread(chats, answers, send);
const composer = new Composer({
  send,
  stop: () => thread.conversation && answers.stopIn(thread.conversation.id),
  editLast: () => thread.lastUserTurn?.edit(),
});
const sidebar = new Sidebar(chats, answers, { open: (id) => { location.hash = id ? `chat/${id}` : "chat"; } });
const operations = new Operations((error) => settings.needKey(error.message, error.status === 403 || keys.admin ? "admin-key" : "api-key"));

let model = "";
let routed = null; // the part of the address that is shown

/// Resolves with the name of the served model.
async function findModel() {
  if (!model) {
    const [served] = await getModels();
    model = served.id;
    byId("model").textContent = model;
    byId("model").title = `${model}, ${served.max_model_len} tokens of context`;
  }
  return model;
}

function showFault(error) {
  if (error.needsKey) settings.needKey(error.message);
}

async function send(text) {
  if (location.hash !== routed) await route(); // the event of the change has not arrived yet
  let { conversation } = thread;
  const shown = conversation ? await chats.branch(conversation.id) : [];
  if (!conversation) {
    conversation = chats.create(text);
    thread.conversation = conversation;
    history.replaceState(null, "", `#chat/${conversation.id}`);
    routed = location.hash;
    byId("tab-chat").href = location.hash;
    sidebar.openId = conversation.id;
  }
  const message = await chats.add(conversation, { parent: shown.at(-1)?.id ?? null, role: "user", content: text });
  thread.scrollToEnd();
  await answers.answer(conversation, message);
}

function showBusy() {
  composer.busy = Boolean(thread.conversation && answers.runsIn(thread.conversation.id));
}

/// Shows the view and the conversation of the address: #chat, #chat/ID, #operations.
async function route() {
  routed = location.hash;
  const [view, id] = location.hash.slice(1).split("/");
  const shown = view === "operations" ? view : "chat";
  for (const name of ["chat", "operations"]) {
    byId(name).hidden = name !== shown;
    if (name === shown) byId(`tab-${name}`).setAttribute("aria-current", "page"); // an empty value means false
    else byId(`tab-${name}`).removeAttribute("aria-current");
  }
  document.body.dataset.view = shown;
  operations.shown = shown === "operations";
  if (shown !== "chat") return;
  const conversation = chats.conversations.get(id) ?? null;
  byId("tab-chat").href = conversation ? `#chat/${id}` : "#chat";
  sidebar.openId = conversation?.id ?? null;
  if (conversation !== thread.conversation || !conversation) await thread.open(conversation);
  showBusy();
  composer.focus();
  document.title = conversation ? `${conversation.title} · Moesaic` : "Moesaic";
}

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address names the open conversation
  if (document.body.dataset.view === "operations") location.hash = byId("tab-chat").hash;
  byId("prompt").focus();
});
for (const kind of ["start", "end"]) answers.addEventListener(kind, showBusy);
answers.addEventListener("end", ({ detail }) => { if (detail.status === "failed") model = ""; }); // the server may have another model now
answers.addEventListener("end", ({ detail }) => announce(detail.status === "done" ? "The answer is complete." : detail.error ?? "The answer has stopped."));
answers.addEventListener("needskey", ({ detail }) => settings.needKey(detail.message, detail.status === 403 ? "admin-key" : "api-key"));
chats.addEventListener("removed", ({ detail: id }) => { // another tab has removed it
  answers.stopIn(id);
  if (thread.conversation?.id !== id) return;
  if (location.hash === `#chat/${id}`) history.replaceState(null, "", "#chat");
  byId("tab-chat").href = "#chat";
  thread.open(null);
  route();
});
chats.addEventListener("fault", ({ detail }) => toast(detail, { seconds: 30 }));

findModel().catch(showFault);
operations.start();
const [markdown] = await Promise.allSettled([loadMarkdown(), chats.load()]);
if (!hasLibraries || markdown.status === "rejected") {
  byId("notice").textContent = hasLibraries ? `Text is shown without formatting: ${markdown.reason.message}.`
    : "This server was built without the libraries of this page: text is shown without formatting, and there are no charts.";
  byId("notice").hidden = false;
}
addEventListener("hashchange", route);
await route();
document.body.dataset.ready = "true";
