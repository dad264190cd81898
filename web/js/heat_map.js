// Draws a matrix as colored cells, rows from top to bottom. 1 is neutral, smaller values have one hue and larger ones
// another. Shows the cell under the pointer.
import { make } from "./dom.js";

const LEAST_SPREAD = 0.1; // distance from 1 of the strongest color, so that a balanced matrix looks calm
const CELL = { least: 3, most: 22, low: 8, high: 14 }; // css pixels: widths and heights
const HEIGHT = 480; // css pixels that many rows share
const LABELS = { left: 40, bottom: 18 };

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/// Every n-th number, so that `room` pixels are left for each.
const stride = (count, size, room) => [1, 2, 5, 10, 20, 50, 100].find((n) => n * size >= room) ?? count;

export class HeatMap {
  #canvas = make("canvas", { role: "img" });
  #scale = make("div", { class: "heat-scale" });
  #readout;
  #shown = null; // {rows, matrix} of the last drawing

  /// `rowName` and `columnName` name an index, `readout` gets the text of the cell under the pointer, or "".
  constructor(parent, { rowName, columnName, readout }) {
    this.names = { rowName, columnName };
    this.#readout = readout;
    parent.append(this.#canvas, this.#scale);
    this.#canvas.addEventListener("pointermove", (event) => this.#read(event));
    this.#canvas.addEventListener("pointerdown", (event) => this.#read(event));
    this.#canvas.addEventListener("pointerleave", () => this.#readout(""));
    new ResizeObserver(() => this.#draw()).observe(parent);
    addEventListener("themechange", () => this.#draw());
  }

  /// `rows` has the numbers of the rows, `matrix` the values [rows][columns].
  show(rows, matrix, label) {
    this.#shown = { rows, matrix };
    this.#canvas.setAttribute("aria-label", label);
    this.#draw();
  }

  #sizes() {
    const columns = this.#shown.matrix[0].length;
    const width = this.#canvas.parentElement.clientWidth - LABELS.left;
    return { columns, cell: Math.max(CELL.least, Math.min(CELL.most, width / columns)),
      line: Math.max(CELL.low, Math.min(CELL.high, Math.floor(HEIGHT / this.#shown.rows.length))) };
  }

  #draw() {
    if (!this.#shown?.matrix.length || !this.#canvas.parentElement.clientWidth) return; // a hidden map has no width yet
    const { rows, matrix } = this.#shown;
    const { columns, cell, line } = this.#sizes();
    const width = LABELS.left + columns * cell;
    const height = rows.length * line + LABELS.bottom;
    const ratio = devicePixelRatio || 1;
    Object.assign(this.#canvas, { width: Math.ceil(width * ratio), height: Math.ceil(height * ratio) });
    Object.assign(this.#canvas.style, { width: `${width}px`, height: `${height}px` });
    const context = this.#canvas.getContext("2d");
    context.scale(ratio, ratio);
    const spread = Math.max(LEAST_SPREAD, ...matrix.flat().map((value) => Math.abs(value - 1)));
    const [low, high, faint, tint] = ["--series-3", "--series-2", "--faint", "--tint"].map(style);
    const gap = cell > 6 ? 1 : 0;
    matrix.forEach((values, row) => values.forEach((value, column) => {
      const place = [LABELS.left + column * cell, row * line, cell - gap, line - 1];
      context.globalAlpha = 1;
      context.fillStyle = tint;
      context.fillRect(...place);
      context.globalAlpha = Math.min(1, Math.abs(value - 1) / spread);
      context.fillStyle = value < 1 ? low : high;
      context.fillRect(...place);
    }));
    context.globalAlpha = 1;
    context.fillStyle = faint;
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "right";
    const rowStride = stride(rows.length, line, 14);
    rows.forEach((name, row) => { if (row % rowStride === 0) context.fillText(String(name), LABELS.left - 8, (row + 0.5) * line); });
    context.textAlign = "center";
    const columnStride = stride(columns, cell, 26);
    for (let column = 0; column < columns; column += columnStride)
      context.fillText(String(column), LABELS.left + (column + 0.5) * cell, rows.length * line + 10);
    this.#showScale(spread);
  }

  #showScale(spread) {
    const text = (value) => make("span", {}, `${Math.max(0, value).toFixed(2)}×`);
    this.#scale.replaceChildren(text(1 - spread), make("span", { class: "ramp" }), text(1 + spread));
  }

  #read(event) {
    if (!this.#shown?.matrix.length) return;
    const { rows, matrix } = this.#shown;
    const { cell, line } = this.#sizes();
    const box = this.#canvas.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top) / line);
    const column = Math.floor((event.clientX - box.left - LABELS.left) / cell);
    const value = matrix[row]?.[column];
    this.#readout(value === undefined ? ""
      : `${this.names.rowName} ${rows[row]}, ${this.names.columnName} ${column}: ${value.toFixed(3)} times the mean`);
  }
}
