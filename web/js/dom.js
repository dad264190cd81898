// Builds DOM nodes and icons.

export const byId = (id) => document.getElementById(id);

/// Creates an element. `properties` has `class`, event handlers such as `onclick`, DOM properties and attributes. Children
/// are nodes or text. Null properties and children are left out.
export function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined) continue;
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// Paths of strokes on a grid of 24 x 24.
const ICONS = {
  menu: "M4 6h16M4 12h16M4 18h16",
  plus: "M12 5v14M5 12h14",
  close: "M6 6l12 12M18 6L6 18",
  check: "M5 13l4.5 4.5L19 7",
  copy: "M9 9h10v11H9zM15 9V5H5v11h4",
  edit: "M5 19h3.5L19 8.5 15.5 5 5 15.5zM13 7.5l3.5 3.5",
  retry: "M19 12a7 7 0 1 1-2.2-5.1M19 3v5h-5",
  forward: "M6 5l9 7-9 7zM18 5v14",
  left: "M14.5 6l-6 6 6 6",
  right: "M9.5 6l6 6-6 6",
  down: "M12 5v14M6 13l6 6 6-6",
  up: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13M10.5 11v5M13.5 11v5",
  more: "M6 12h.01M12 12h.01M18 12h.01",
  save: "M12 4v11M7 11l5 5 5-5M5 20h14",
  load: "M12 16V5M7 9l5-5 5 5M5 20h14",
  tool: "M14.5 9.5L20 4M16 4h4v4M13 6H5v13h13v-8",
  settings: "M4 7h9M17 7h3M4 17h3M11 17h9M15 4.5v5M9 14.5v5",
  chat: "M4 5h16v11H11l-5 4v-4H4z",
  chart: "M4 4v16h16M8 15l4-5 3 3 5-7",
  theme: "M12 4a8 8 0 1 0 0 16zM12 4a8 8 0 0 1 0 16",
};

export function icon(name) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("class", `icon icon-${name}`);
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(space, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/// Creates a button with an icon and either a visible `text` or a `label` for tooltips and screen readers.
export function button(name, { label, text, onclick, ...more }) {
  return make("button", { type: "button", class: text ? "quiet" : "quiet square", title: text ? null : label,
    "aria-label": text ? null : label, onclick, ...more }, icon(name), text ? make("span", {}, text) : null);
}

/// Adds icons to the static elements that have `data-icon`.
export function fillIcons() {
  for (const node of document.querySelectorAll("[data-icon]")) node.prepend(icon(node.dataset.icon));
}

/// Copies text. Also works on pages without https, which have no navigator.clipboard.
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return;
  } catch { /* navigator.clipboard is missing or not allowed. */ }
  const area = make("textarea", { value: text, class: "off-screen" });
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/// Creates a copy button, whose icon changes for a moment after a copy. `read` returns the text.
export function copyButton(read, text) {
  const made = button("copy", { label: "Copy", text, onclick: async () => {
    await copyText(read());
    made.replaceChild(icon("check"), made.firstChild);
    made.classList.add("confirmed");
    setTimeout(() => {
      made.replaceChild(icon("copy"), made.firstChild);
      made.classList.remove("confirmed");
    }, 1500);
  } });
  return made;
}

/// Sets the height of a text area to that of its text.
export function fitHeight(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + area.offsetHeight - area.clientHeight}px`;
}

export function download(name, type, text) {
  const link = make("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
