// The panel of experts: load of ranks by layer, and the last changes of their placement.
import { byId, make } from "./dom.js";
import { HeatMap } from "./heat_map.js";

const SHOWN_EVENTS = 8;
const STATES = { idle: "Experts may move; none does now.", planning: "A placement is being planned.",
  moving: "Experts are moving to other ranks.", changing: "All ranks change to their new experts.", fixed: "Experts stay on their ranks." };

let map = null;
let cell = ""; // the text of the cell under the pointer
let summary = "";

const showCaption = () => { byId("experts-caption").textContent = cell || summary; };

/// The row and column of the largest value.
function worst(matrix) {
  let best = { row: 0, column: 0, value: -1 };
  matrix.forEach((values, row) => values.forEach((value, column) => { if (value > best.value) best = { row, column, value }; }));
  return best;
}

/// `experts` is a member of /state; null where ranks do not divide the experts.
export function drawExperts(experts) {
  byId("experts-panel").hidden = !experts;
  if (!experts) return;
  const { layers = [], over_mean: matrix = [] } = experts.rank_load ?? {};
  const state = STATES[experts.state] ?? experts.state;
  if (matrix.length) {
    map ??= new HeatMap(byId("experts-map"), { rowName: "Layer", columnName: "rank", readout: (text) => { cell = text; showCaption(); } });
    const { row, column, value } = worst(matrix);
    const mean = matrix.reduce((sum, values) => sum + Math.max(...values), 0) / matrix.length;
    summary = `Recent tokens of ranks (across) in layers (down), over the mean. Most: ${value.toFixed(2)} times the mean on rank ${column} in layer ${layers[row]}; `
      + `mean of layers ${mean.toFixed(2)}. ${state}`;
    map.show(layers, matrix, summary);
  } else {
    summary = `No window of loads has ended. ${state}`;
  }
  byId("experts-map").hidden = matrix.length === 0;
  showCaption();
  byId("experts-history").replaceChildren(...experts.history.slice(-SHOWN_EVENTS).reverse().map((event) => make("li", {}, event)));
  byId("experts-history").hidden = experts.history.length === 0;
}
