import { getJson, setApiKey } from "./api.js";
import { startChat } from "./chat.js";
import { startOperations } from "./operations.js";

const byId = (id) => document.getElementById(id);
const VIEWS = ["chat", "operations"];

function show() {
  const wanted = location.hash.slice(1);
  const view = VIEWS.includes(wanted) ? wanted : "chat";
  for (const name of VIEWS) {
    byId(name).hidden = name !== view;
    if (name === view) byId(`tab-${name}`).setAttribute("aria-current", "page");
    else byId(`tab-${name}`).removeAttribute("aria-current");
  }
}

function startTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    const chosen = localStorage.getItem("moesaic.theme");
    document.documentElement.dataset.theme = chosen ?? (system.matches ? "dark" : "light");
  };
  byId("theme").addEventListener("click", () => {
    const dark = document.documentElement.dataset.theme === "dark";
    localStorage.setItem("moesaic.theme", dark ? "light" : "dark");
    apply();
  });
  system.addEventListener("change", apply);
  apply();
}

async function showModel() {
  try {
    const model = (await getJson("v1/models")).data[0];
    byId("model").textContent = model.id;
    return model.id;
  } catch (error) {
    byId("model").textContent = error.message;
    return "";
  }
}

startTheme();
addEventListener("hashchange", show);
show();
const key = byId("api-key");
key.addEventListener("input", () => {
  setApiKey(key.value);
  showModel();
});
startChat(showModel);
startOperations();
showModel();
