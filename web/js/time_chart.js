// Draws lines over time with an axis of clock times. Shows the values under the pointer, which all charts share. Dragging
// zooms.
import { make } from "./dom.js";
import { loadLibrary } from "./library.js";

const HEIGHT = 180;
const GAP = 30; // seconds without a reading that break a line

let Plot = null;

export async function loadCharts() {
  Plot = await loadLibrary("uplot", { globalName: "uPlot", styles: "uPlot.min.css" });
}

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/// Converts columns of readings to uPlot's data. Adds an empty value where readings are missing, so that lines have a gap.
function withGaps(times, columns) {
  const data = [[], ...columns.map(() => [])];
  times.forEach((time, i) => {
    if (i && time - times[i - 1] > GAP) {
      data[0].push(times[i - 1] + 1);
      columns.forEach((_, c) => data[c + 1].push(null));
    }
    data[0].push(time);
    columns.forEach((column, c) => data[c + 1].push(column[i]));
  });
  return data;
}

export class TimeChart {
  #box;
  #plot = null;
  #zoomed = false;

  /// `names` has the names of the lines, `format` prints a value, and the scale reaches at least `least`.
  constructor(parent, { title, names, format, least }) {
    this.options = { names, format, least };
    this.#box = make("div", { class: "plot" });
    parent.append(make("section", { class: "chart" }, make("h2", {}, title), this.#box));
    new ResizeObserver(() => {
      if (this.#plot && this.#box.clientWidth) this.#plot.setSize({ width: this.#box.clientWidth, height: HEIGHT });
    }).observe(this.#box);
    addEventListener("themechange", () => {
      this.#plot?.destroy();
      this.#plot = null;
      if (this.last) this.draw(...this.last);
    });
  }

  /// Draws the columns over [from, to], in seconds since 1970.
  draw(times, columns, from, to) {
    this.last = [times, columns, from, to];
    if (!this.#box.clientWidth) return; // a hidden chart has no width yet
    this.#plot ??= this.#make();
    const data = withGaps(times, columns);
    this.#plot.setData(data, false);
    if (!this.#zoomed) this.#plot.setScale("x", { min: from, max: to });
    this.#showNewest();
  }

  /// Ends a zoom.
  reset() { this.#zoomed = false; }

  // Shows the values under the pointer in the legend, or the newest ones.
  #showNewest() {
    const { cursor, data } = this.#plot;
    if (!(cursor.left >= 0) && data[0].length) this.#plot.setLegend({ idx: data[0].length - 1 }, false);
  }

  #make() {
    const { names, format, least } = this.options;
    const axis = { stroke: style("--faint"), grid: { stroke: style("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const plot = new Plot({
      width: this.#box.clientWidth,
      height: HEIGHT,
      padding: [8, 22, 0, 0],
      legend: { markers: { width: 0, fill: (plot, i) => plot.series[i].stroke?.() } },
      cursor: { sync: { key: "moesaic" }, drag: { x: true, y: false }, points: { size: 6 } },
      hooks: {
        setSelect: [({ select }) => { this.#zoomed = select.width > 0; }],
      },
      scales: { x: { time: true }, y: { range: (_, low, high) => [0, Math.max(least, (high ?? 0) * 1.08) || 1] } },
      axes: [
        { ...axis, space: 66, size: 26, gap: 4, values: [[3600, "{HH}:{mm}", null, null, null, null, null, null, 1], [60, "{HH}:{mm}", null, null, null, null, null, null, 1],
          [1, "{HH}:{mm}:{ss}", null, null, null, null, null, null, 1]] },
        { ...axis, size: 62, values: (_, values) => values.map(format) },
      ],
      series: [
        { label: "Time", value: "{HH}:{mm}:{ss}" },
        ...names.map((label, i) => ({ label, stroke: style(`--series-${i + 1}`), width: 1.75, points: { show: false },
          value: (_, value) => value === null || value === undefined ? "–" : format(value) })),
      ],
    }, [[]], this.#box);
    plot.over.addEventListener("mouseleave", () => setTimeout(() => this.#plot && this.#showNewest()));
    plot.over.addEventListener("dblclick", () => { this.#zoomed = false; });
    return plot;
  }
}
