// The model card: what is served, in numbers and in words.

import { find, make } from "./dom.js";

export function showCard(card) {
  find("name").textContent = card.names[0];
  document.title = `${card.names[0]} · hex-llm`;
  const flags = Object.entries(card.flags).map(([name, value]) => flag(name, value));
  const rows = [
    ["Name", card.names.join(", ")],
    ["Family", card.architecture.replace(/ForCausalLM$|ForConditionalGeneration$/, "")],
    ["Size", `${short(card.num_parameters)} parameters`],
    ["Context", `${count(card.context)} tokens`],
    ["dtype", card.dtype],
    ["Quantization", card.quantization ?? "none"],
    ["KV cache", `${count(card.kv_tokens)} tokens in ${card.kv_cache_dtype}`],
    ["Device", card.device + (card.num_engines > 1 ? ` (${card.num_engines} engines)` : "")],
    ["Flags", flags.length ? make("code", {}, flags.join("\n")) : "all as by default"],
    ["Version", `hex-llm ${card.version}`],
  ];
  find("card").replaceChildren(
    ...rows.map(([name, value]) => {
      const className = value instanceof Element ? "wide" : "";
      return make("div", { className }, make("dt", {}, name), make("dd", {}, value));
    }),
  );
}

function flag(name, value) {
  if (value === true) return `--${name}`;
  if (value === false) return `--no-${name}`;
  return `--${name}=${value}`;
}

const count = (number) => number.toLocaleString("en");

/** 8.03 B, 494 M: in three digits. */
function short(number) {
  for (const [size, unit] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "K"]]) {
    if (number >= size) return `${Number((number / size).toPrecision(3))} ${unit}`;
  }
  return String(number);
}
