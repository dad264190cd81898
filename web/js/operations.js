// The operations view. Reads /metrics, and /state while it is visible, and stores the last hour.
import { getMetrics, getState, keys } from "./api.js";
import { byId, make } from "./dom.js";
import { drawExperts } from "./expert_panel.js";
import { hasLibraries } from "./library.js";
import { parse, quantiles, total } from "./metrics.js";
import { HOUR, Samples } from "./samples.js";
import { read, write } from "./storage.js";
import { TimeChart, loadCharts } from "./time_chart.js";

const PERIOD = 2000; // ms between readings
const HIDDEN_PERIOD = 10000; // ms between readings while the page is hidden
const QUANTILE_WINDOW = 30; // seconds that a percentile covers
const SHOWN_REQUESTS = 50;
const WINDOW = "moesaic.window"; // localStorage: seconds that the charts show

const count = (value) => value >= 1e6 ? `${Math.round(value / 1e5) / 10}M` : value >= 1e4 ? `${Math.round(value / 100) / 10}k`
  : value >= 100 ? `${Math.round(value)}` : `${Math.round(value * 10) / 10}`;
const time = (seconds) => seconds === 0 ? "0" : seconds >= 1 ? `${seconds.toFixed(seconds >= 10 ? 0 : 1)} s`
  : `${(seconds * 1000).toFixed(seconds >= 0.01 ? 0 : 1)} ms`;
const percent = (part) => `${(part * 100).toFixed(part > 0 && part < 0.1 ? 1 : 0)}%`;

const COLUMNS = 10; // throughput 2, first token 3, token gap 3, requests 2
const CHARTS = [
  { title: "Throughput, tokens/s", names: ["prompt", "output"], format: count, least: 10, first: 0 },
  { title: "Requests", names: ["running", "waiting"], format: count, least: 4, first: 8 },
  { title: "Time to first token", names: ["p50", "p90", "p99"], format: time, least: 0.01, first: 2 },
  { title: "Time between tokens", names: ["p50", "p90", "p99"], format: time, least: 0.01, first: 5 },
];

const tile = (name, value, unit = "") => make("div", { class: "tile" }, make("div", { class: "name" }, name),
  make("div", { class: "value" }, value, unit ? make("small", {}, unit) : null));

function setHealth(state, text) {
  const health = byId("health");
  health.dataset.state = state;
  if (health.textContent === text) return; // screen readers announce each change of this element
  health.textContent = text;
  health.title = text;
}

export class Operations {
  #samples = new Samples(COLUMNS);
  #readings = []; // {now, families} of the last minute
  #charts = [];
  #window = Number(read("localStorage", WINDOW)) || 300;
  #timer = 0;
  #shown = false;
  #refused = null; // keys that /state refused; they are not sent again, since the server logs each refusal
  #asked = false; // true if the dialog for a key has been opened

  /// `needKey(error)` is called once when /state refuses the key.
  constructor(needKey) {
    this.needKey = needKey;
    for (const choice of document.querySelectorAll("input[name=window]")) {
      choice.checked = Number(choice.value) === this.#window;
      choice.addEventListener("change", () => {
        this.#window = Number(choice.value);
        write("localStorage", WINDOW, choice.value);
        for (const chart of this.#charts) chart.reset();
        this.#drawCharts();
      });
    }
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.#soon(); });
  }

  async start() {
    await this.#samples.load();
    this.#soon();
  }

  set shown(shown) {
    this.#shown = shown;
    if (!shown) return;
    this.#refused = null;
    this.#showCharts();
    this.#soon();
  }

  /// Reads again after a change of the keys.
  retry() {
    this.#asked = false;
    this.#soon();
  }

  #soon() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#read(), 0);
  }

  async #showCharts() {
    byId("charts-panel").hidden = !hasLibraries;
    if (!hasLibraries || this.#charts.length) return;
    this.#charts = CHARTS.map((chart) => new TimeChart(byId("charts"), chart));
    try {
      await loadCharts();
      this.#loaded = true;
      this.#drawCharts();
    } catch (error) {
      byId("charts").replaceChildren(make("p", { class: "fault" }, `There are no charts: ${error.message}.`));
    }
  }
  #loaded = false;

  #drawCharts() {
    if (!this.#loaded || !this.#shown) return;
    const { times } = this.#samples;
    const to = Date.now() / 1000;
    const from = to - Math.min(this.#window, HOUR);
    const start = Math.max(0, times.findIndex((at) => at >= from) - 1); // one sample before the edge, so that lines reach it
    const cut = times.slice(start);
    CHARTS.forEach(({ names, first }, i) => this.#charts[i].draw(cut, names.map((_, j) => this.#samples.column(first + j).slice(start)), from, to));
  }

  async #read() {
    clearTimeout(this.#timer);
    const shown = this.#shown && !document.hidden;
    try {
      const [text, state] = await Promise.all([getMetrics(), shown ? this.#readState() : null]);
      this.#drawReading(Date.now(), parse(text));
      if (state) {
        drawBlocks(state);
        drawExperts(state.experts);
        drawRequests(state.requests);
      }
    } catch (error) {
      setHealth("away", error instanceof TypeError ? "no answer" : error.message);
    }
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#read(), document.hidden ? HIDDEN_PERIOD : PERIOD);
  }

  async #readState() {
    const used = JSON.stringify(keys);
    if (used === this.#refused) return null;
    try {
      const state = await getState();
      byId("state-panels").hidden = false;
      byId("state-fault").hidden = true;
      return state;
    } catch (error) {
      if (error.status === 401 || error.status === 403) this.#refused = used;
      if (!error.needsKey) throw error;
      byId("state-panels").hidden = true;
      byId("state-fault").hidden = false;
      byId("state-reason").textContent = error.message;
      byId("state-key").onclick = () => this.needKey(error);
      if (!this.#asked) this.needKey(error);
      this.#asked = true;
      return null;
    }
  }

  #drawReading(now, families) {
    const last = this.#readings.at(-1);
    const oldest = this.#readings.find((reading) => reading.now >= now - QUANTILE_WINDOW * 1000) ?? last;
    this.#readings.push({ now, families });
    while (this.#readings[0].now < now - QUANTILE_WINDOW * 2000) this.#readings.shift();
    const rate = (name) => last ? Math.max(0, total(families, name) - total(last.families, name)) / ((now - last.now) / 1000) : null;
    const spread = (name) => (oldest && quantiles(oldest.families, families, name, [0.5, 0.9, 0.99])) ?? [null, null, null];
    const output = rate("vllm:generation_tokens_total");
    const running = total(families, "vllm:num_requests_running") ?? 0;
    const waiting = total(families, "vllm:num_requests_waiting") ?? 0;
    const first = spread("vllm:time_to_first_token_seconds");
    const between = spread("vllm:inter_token_latency_seconds");
    this.#samples.add(now / 1000, [rate("vllm:prompt_tokens_total"), output, ...first, ...between, running, waiting]);
    setHealth(running + waiting > 0 ? "busy" : "ready", running + waiting > 0 ? `${running} running` : "ready");
    if (!this.#shown) return;
    this.#drawCharts();
    const queries = total(families, "vllm:prefix_cache_queries_total") ?? 0;
    const hits = total(families, "vllm:prefix_cache_hits_total") ?? 0;
    byId("tiles").replaceChildren(
      tile("Output", output === null ? "–" : count(output), "tokens/s"),
      tile("First token, p50", first[0] === null ? "–" : time(first[0])),
      tile("Token gap, p50", between[0] === null ? "–" : time(between[0])),
      tile("Running", count(running), waiting ? `+${count(waiting)} waiting` : ""),
      tile("Prompts from cache", queries ? percent(hits / queries) : "–"),
      tile("Preemptions", count(total(families, "vllm:num_preemptions_total") ?? 0)));
  }
}

function drawBlocks({ kv }) {
  const { total_blocks: all, used_blocks: used, cached_blocks: cached, free_blocks: free, block_tokens: tokens, tree_nodes: nodes } = kv;
  byId("blocks").replaceChildren(...[["used", used], ["cached", cached], ["free", free]].map(([name, blocks]) => {
    const span = make("span", { class: name, hidden: blocks === 0, title: `${name}: ${blocks} blocks` });
    span.style.flexGrow = blocks;
    return span;
  }));
  const text = `${count(used)} blocks in use, ${count(cached)} cached, ${count(free)} free, of ${count(all)} with ${tokens} tokens each; ${count(nodes)} nodes in the prefix tree`;
  byId("blocks").setAttribute("aria-label", text);
  byId("blocks-caption").textContent = text;
}

function drawRequests(requests) {
  byId("requests").tBodies[0].replaceChildren(...requests.slice(0, SHOWN_REQUESTS).map((request) => make("tr", {},
    ...[request.id, request.state, request.prompt_tokens, request.cached_tokens, request.output_tokens, time(request.age_seconds)]
      .map((value, i) => make("td", { class: i >= 2 ? "n" : null }, String(value))))));
  byId("requests").hidden = requests.length === 0;
  byId("requests-caption").textContent = requests.length === 0 ? "No request is running."
    : requests.length > SHOWN_REQUESTS ? `and ${requests.length - SHOWN_REQUESTS} more` : "";
}
