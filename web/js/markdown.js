// A model's Markdown as DOM nodes. Text only ever becomes text nodes, so nothing a model says is run as HTML.

const INLINE = /(`[^`\n]+`)|(\*\*[^*\n]+\*\*)|(\*[^*\s][^*\n]*\*)|(\[[^\]\n]+\]\(https?:\/\/[^)\s]+\))/g;

function element(name, children = []) {
  const node = document.createElement(name);
  node.append(...children);
  return node;
}

function inline(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    nodes.push(text.slice(end, match.index));
    const [all, code, strong, emphasis] = match;
    if (code) nodes.push(element("code", [code.slice(1, -1)]));
    else if (strong) nodes.push(element("strong", inline(strong.slice(2, -2))));
    else if (emphasis) nodes.push(element("em", inline(emphasis.slice(1, -1))));
    else {
      const [, label, address] = /^\[(.+)\]\((.+)\)$/.exec(all);
      const link = element("a", [label]);
      link.href = address;
      link.rel = "noopener noreferrer";
      link.target = "_blank";
      nodes.push(link);
    }
    end = match.index + all.length;
  }
  nodes.push(text.slice(end));
  return nodes;
}

const BULLET = /^\s*[-*+]\s+(.*)$/;
const NUMBER = /^\s*(\d+)[.)]\s+(.*)$/;

/// The nodes of `source`. An unfinished code fence reads as code up to the end, as a stream needs it.
export function render(source) {
  const nodes = [];
  const lines = source.split("\n");
  let paragraph = [];
  const flush = () => {
    if (paragraph.length) {
      const node = element("p");
      paragraph.forEach((line, i) => node.append(...(i ? [element("br")] : []), ...inline(line)));
      nodes.push(node);
    }
    paragraph = [];
  };
  for (let i = 0; i < lines.length; ++i) {
    const line = lines[i];
    const heading = /^(#{1,6})\s+(.*)$/.exec(line);
    if (/^\s*```/.test(line)) {
      flush();
      const code = [];
      while (++i < lines.length && !/^\s*```/.test(lines[i])) code.push(lines[i]);
      nodes.push(element("pre", [element("code", [code.join("\n")])]));
    } else if (heading) {
      flush();
      nodes.push(element(`h${Math.min(6, heading[1].length + 1)}`, inline(heading[2])));
    } else if (BULLET.test(line) || NUMBER.test(line)) {
      flush();
      const kind = BULLET.test(line) ? BULLET : NUMBER;
      const list = element(kind === BULLET ? "ul" : "ol");
      if (kind === NUMBER) list.start = Number(NUMBER.exec(line)[1]);
      for (; i < lines.length && kind.test(lines[i]); ++i) list.append(element("li", inline(kind.exec(lines[i]).at(-1))));
      --i;
      nodes.push(list);
    } else if (line.trim() === "") flush();
    else paragraph.push(line);
  }
  flush();
  return nodes;
}
