// Shows a menu under a button. Arrow keys move the focus, and Escape closes it.
import { icon, make } from "./dom.js";

let open = null;

export function closeMenu() {
  open?.remove();
  open?.anchor.setAttribute("aria-expanded", "false");
  open = null;
}

/// Opens a menu of [{icon, text, run, danger?}] at `anchor`.
export function openMenu(anchor, entries) {
  const again = open?.anchor === anchor;
  closeMenu();
  if (again) return;
  const items = entries.map((entry) => make("button", { type: "button", role: "menuitem", tabIndex: -1,
    class: entry.danger ? "danger" : "", onclick: () => {
      closeMenu();
      entry.run();
    } }, icon(entry.icon), entry.text));
  open = make("div", { class: "menu", role: "menu" }, ...items);
  open.anchor = anchor;
  open.addEventListener("keydown", (event) => {
    const at = items.indexOf(document.activeElement);
    const next = { ArrowDown: at + 1, ArrowUp: at - 1 + items.length, Home: 0, End: items.length - 1 }[event.key];
    if (next !== undefined) items[next % items.length].focus();
    else if (event.key === "Escape" || event.key === "Tab") {
      closeMenu();
      anchor.focus();
    } else return;
    event.preventDefault();
    event.stopPropagation();
  });
  document.body.append(open);
  anchor.setAttribute("aria-expanded", "true");
  const box = anchor.getBoundingClientRect();
  const left = Math.max(8, Math.min(box.left, innerWidth - open.offsetWidth - 8));
  const below = box.bottom + open.offsetHeight + 8 < innerHeight;
  open.style.left = `${left}px`;
  open.style.top = `${below ? box.bottom + 4 : box.top - open.offsetHeight - 4}px`;
  items[0].focus();
}

addEventListener("pointerdown", (event) => { if (open && !open.contains(event.target) && !open.anchor.contains(event.target)) closeMenu(); });
addEventListener("resize", closeMenu);
