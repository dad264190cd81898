// A small line chart: SVG paths over time, ticks and a legend with the newest values.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 600;
const HEIGHT = 150;
const FIRST_MINUTE = 60; // seconds that a chart shows at least

/// The least of 1, 2, 4, 6, 8 x 10^n that is not below `value`: half of it is as easily read.
function niceTop(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 6, 8, 10].map((step) => step * power).find((top) => top >= value * 0.999);
}

function make(tag, className, text) {
  const node = document.createElement(tag);
  node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

export class Chart {
  /// `names` of the series, `format` a value; the window ends now and grows to `seconds`, the scale reaches `least`.
  constructor(parent, title, names, format, seconds, least) {
    this.names = names;
    this.format = format;
    this.seconds = seconds;
    this.least = least;
    this.points = []; // {time, values}; a value is null where nothing was measured
    const box = make("figure", "chart");
    box.style.margin = 0;
    box.append(make("h2", "", title));
    this.plot = make("div", "plot");
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    this.svg.setAttribute("preserveAspectRatio", "none");
    this.svg.setAttribute("role", "img");
    this.svg.setAttribute("aria-label", title);
    this.plot.append(this.svg);
    this.legend = make("figcaption", "legend");
    box.append(this.plot, this.legend);
    parent.append(box);
  }

  add(time, values) {
    this.points.push({ time, values });
    while (this.points.length && this.points[0].time < time - this.seconds * 1000) this.points.shift();
    this.draw(time);
  }

  draw(now) {
    const highest = Math.max(...this.points.flatMap((point) => point.values.map((value) => value ?? 0)));
    const top = niceTop(Math.max(highest, this.least));
    const span = Math.max(FIRST_MINUTE * 1000, now - this.points[0].time);
    const x = (time) => WIDTH * (1 - (now - time) / span);
    const y = (value) => (HEIGHT - 1) * (1 - value / top) + 0.5;
    const lines = [0, 0.5, 1].map((part) => {
      const line = document.createElementNS(SVG, "line");
      line.setAttribute("class", "axis");
      for (const [name, value] of Object.entries({ x1: 0, x2: WIDTH, y1: y(top * part), y2: y(top * part) })) line.setAttribute(name, value);
      return line;
    });
    const paths = this.names.map((_, series) => {
      let drawing = "";
      let pen = false;
      for (const { time, values } of this.points) {
        const value = values[series];
        if (value === null || value === undefined) {
          pen = false;
          continue;
        }
        drawing += `${pen ? "L" : "M"}${x(time).toFixed(1)} ${y(value).toFixed(1)}${pen ? "" : "h.1"}`;
        pen = true;
      }
      const path = document.createElementNS(SVG, "path");
      path.setAttribute("d", drawing);
      path.style.stroke = `var(--series-${series + 1})`;
      return path;
    });
    this.svg.replaceChildren(...lines, ...paths);
    this.plot.querySelectorAll(".tick").forEach((tick) => tick.remove());
    for (const part of [0, 0.5, 1]) {
      const tick = make("span", "tick", this.format(top * part));
      tick.style.top = `${y(top * part) / HEIGHT * 100}%`;
      this.plot.append(tick);
    }
    const newest = this.points.at(-1)?.values ?? [];
    this.legend.replaceChildren(...this.names.map((name, series) => {
      const entry = make("span", "");
      const mark = make("i", "");
      mark.style.background = `var(--series-${series + 1})`;
      const value = newest[series];
      entry.append(mark, `${name} `, make("b", "", value === null || value === undefined ? "–" : this.format(value)));
      return entry;
    }));
  }
}
