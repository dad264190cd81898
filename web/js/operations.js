// The operations view: reads /metrics and /state once a second and keeps five minutes of it.
import { getJson, getText } from "./api.js";
import { Chart } from "./chart.js";
import { parse, quantiles, total } from "./metrics.js";

const byId = (id) => document.getElementById(id);
const PERIOD = 1000; // ms between readings
const WINDOW = 300; // seconds shown
const QUANTILE_WINDOW = 30; // seconds that a percentile looks back

const count = (value) => value >= 1e6 ? `${Math.round(value / 1e5) / 10}M` : value >= 1e4 ? `${Math.round(value / 100) / 10}k` : value >= 100 ? `${Math.round(value)}` : `${Math.round(value * 10) / 10}`;
const time = (seconds) => seconds === 0 ? "0" : seconds >= 1 ? `${seconds.toFixed(seconds >= 10 ? 0 : 1)} s` : `${(seconds * 1000).toFixed(seconds >= 0.01 ? 0 : 1)} ms`;
const percent = (part) => `${(part * 100).toFixed(part > 0 && part < 0.1 ? 1 : 0)}%`;

function tile(name, value, unit = "") {
  const box = document.createElement("div");
  box.className = "tile";
  const label = document.createElement("div");
  label.className = "name";
  label.textContent = name;
  const number = document.createElement("div");
  number.className = "value";
  number.textContent = value;
  if (unit) {
    const small = document.createElement("small");
    small.textContent = unit;
    number.append(small);
  }
  box.append(label, number);
  return box;
}

function drawBlocks(state) {
  const { total_blocks: all, used_blocks: used, cached_blocks: cached, free_blocks: free, block_tokens: tokens, tree_nodes: nodes } = state.kv;
  const parts = [["in use", used, "var(--series-1)"], ["cached", cached, "var(--series-2)"], ["free", free, "transparent"]];
  byId("blocks").replaceChildren(...parts.map(([name, blocks, color]) => {
    const span = document.createElement("span");
    span.style.flexGrow = blocks;
    span.style.background = color;
    span.title = `${name}: ${blocks} blocks`;
    return span;
  }));
  const text = `${count(used)} blocks in use, ${count(cached)} cached, ${count(free)} free, of ${count(all)} with ${tokens} tokens each; ${count(nodes)} nodes in the prefix tree`;
  byId("blocks").setAttribute("aria-label", text);
  byId("blocks-caption").textContent = text;
}

function drawRequests(requests) {
  const rows = requests.slice(0, 50).map((request) => {
    const row = document.createElement("tr");
    const cells = [request.id, request.state, request.prompt_tokens, request.cached_tokens, request.output_tokens, time(request.age_seconds)];
    cells.forEach((text, i) => {
      const cell = document.createElement("td");
      cell.textContent = text;
      if (i >= 2) cell.className = "n";
      row.append(cell);
    });
    return row;
  });
  byId("requests").tBodies[0].replaceChildren(...rows);
  byId("requests-caption").textContent = requests.length === 0 ? "Nothing is running."
    : requests.length > 50 ? `and ${requests.length - 50} more` : "";
}

function setHealth(state, text) {
  byId("health").dataset.state = state;
  byId("health").textContent = text;
}

export function startOperations() {
  const charts = byId("charts");
  const throughput = new Chart(charts, "Throughput, tokens/s", ["prompt", "output"], count, WINDOW, 10);
  const ttft = new Chart(charts, "Time to first token", ["p50", "p90", "p99"], time, WINDOW, 0);
  const itl = new Chart(charts, "Time between tokens", ["p50", "p90", "p99"], time, WINDOW, 0);
  const batch = new Chart(charts, "Requests", ["running", "waiting"], count, WINDOW, 2);
  const readings = []; // {now, families}

  function drawCharts(now, families) {
    const last = readings.at(-1);
    const oldest = readings.find((reading) => reading.now >= now - QUANTILE_WINDOW * 1000) ?? last;
    readings.push({ now, families });
    while (readings[0].now < now - QUANTILE_WINDOW * 2000) readings.shift();
    const rate = (name) => last ? Math.max(0, total(families, name) - total(last.families, name)) / ((now - last.now) / 1000) : 0;
    const spread = (name) => (oldest && quantiles(oldest.families, families, name, [0.5, 0.9, 0.99])) ?? [null, null, null];
    const output = rate("vllm:generation_tokens_total");
    const running = total(families, "vllm:num_requests_running") ?? 0;
    const waiting = total(families, "vllm:num_requests_waiting") ?? 0;
    throughput.add(now, [rate("vllm:prompt_tokens_total"), output]);
    const first = spread("vllm:time_to_first_token_seconds");
    const between = spread("vllm:inter_token_latency_seconds");
    ttft.add(now, first);
    itl.add(now, between);
    batch.add(now, [running, waiting]);
    const queries = total(families, "vllm:prefix_cache_queries_total") ?? 0;
    const hits = total(families, "vllm:prefix_cache_hits_total") ?? 0;
    byId("tiles").replaceChildren(
      tile("Output", count(output), "tokens/s"),
      tile("First token, p50", first[0] === null ? "–" : time(first[0])),
      tile("Token gap, p50", between[0] === null ? "–" : time(between[0])),
      tile("Running", count(running), waiting ? `+${count(waiting)} waiting` : ""),
      tile("Prompts from cache", queries ? percent(hits / queries) : "–"),
      tile("Preemptions", count(total(families, "vllm:num_preemptions_total") ?? 0)));
    setHealth(running + waiting > 0 ? "busy" : "ready", running + waiting > 0 ? `${running} running` : "ready");
  }

  async function read() {
    try {
      const [text, state] = await Promise.all([getText("metrics"), getJson("state")]);
      drawCharts(Date.now(), parse(text));
      drawBlocks(state);
      drawRequests(state.requests);
    } catch (error) {
      setHealth("away", error instanceof TypeError ? "no answer" : error.message);
    }
    setTimeout(read, document.hidden ? PERIOD * 5 : PERIOD);
  }
  read();
}
