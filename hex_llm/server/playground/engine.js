// The live view of the engine, drawn from /metrics.

import { get } from "./api.js";
import { find } from "./dom.js";

const PREFIX = "hexllm:";
const EVERY_MS = 1000;
const NUM_POINTS = 60;

export class EngineView {
  /** `lost` is called when the server is not there any more, or not ready. It may then be started anew. */
  constructor(lost) {
    this.lost = lost;
    this.points = Array(NUM_POINTS).fill(0);
    this.before = null;
    this.timer = null;
    this.looks = 0;
    document.addEventListener("visibilitychange", () => this.timer !== null && this.look());
  }

  start(card) {
    this.caching = card.prefix_caching;
    this.look();
  }

  async look() {
    clearTimeout(this.timer);
    this.timer = 0; // none, but it has been started
    if (document.hidden) return; // it goes on when somebody looks
    const look = ++this.looks;
    const values = await read();
    if (look !== this.looks) return; // another one goes on
    if (values?.get("ready")) {
      this.show(values, performance.now());
      this.timer = setTimeout(() => this.look(), EVERY_MS);
    } else {
      this.timer = null;
      this.lost();
    }
  }

  show(values, now) {
    find("running").textContent = values.get("num_requests_running") ?? "–";
    find("queued").textContent = values.get("num_requests_waiting") ?? "–";
    const used = values.get("kv_cache_usage_perc");
    share("kv", used);
    const queries = values.get("prefix_cache_queries_total");
    share("hits", queries ? values.get("prefix_cache_hits_total") / queries : undefined);
    if (!this.caching) find("hits").textContent = "off";

    const tokens = values.get("generation_tokens_total") ?? 0;
    // A server that was started again counts from 0.
    if (this.before && tokens >= this.before.tokens) {
      this.points.push(((tokens - this.before.tokens) / (now - this.before.now)) * 1000);
      this.points = this.points.slice(-NUM_POINTS);
      find("throughput").textContent = this.points.at(-1).toFixed(this.points.at(-1) < 100 ? 1 : 0);
      this.draw();
    }
    this.before = { tokens, now };
  }

  draw() {
    const most = Math.max(...this.points, 1);
    const x = (place) => (place * 120) / (NUM_POINTS - 1);
    const line = this.points.map((value, place) => `${x(place).toFixed(1)} ${(30 - (value / most) * 27).toFixed(1)}`);
    const [area, stroke] = find("spark").children;
    stroke.setAttribute("d", `M${line.join("L")}`);
    area.setAttribute("d", `M0 32L${line.join("L")}L120 32Z`);
  }
}

async function read() {
  try {
    return parse(await (await get("/metrics")).text());
  } catch {
    return null; // whoever finds out what is the matter says it
  }
}

function share(id, value) {
  find(id).textContent = value === undefined ? "–" : `${(value * 100).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
  find(`${id}-bar`).value = value ?? 0;
}

/** Prometheus' text as numbers by name; samples that differ in labels only are added up. */
export function parse(text) {
  const values = new Map();
  for (const line of text.split("\n")) {
    if (!line.startsWith(PREFIX)) continue;
    const name = line.slice(PREFIX.length).match(/^\w+/)[0];
    values.set(name, (values.get(name) ?? 0) + Number(line.slice(line.lastIndexOf(" "))));
  }
  return values;
}
