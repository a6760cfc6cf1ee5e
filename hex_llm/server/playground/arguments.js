// The request's arguments: a field each, with the limits that the server told, and what they come to in a body.

import { find, make } from "./dom.js";

const STORED = "hex-llm-arguments";
const UNLIMITED = 2 ** 31 - 1; // a limit that nobody comes near
const NUMBERS = { temperature: 0.1, top_p: 0.05, top_k: 1, max_tokens: 1, seed: 1 };

export class Arguments {
  /** `changed` is called whenever what they come to may have. */
  constructor(changed) {
    this.form = find("arguments");
    this.fields = new Map();
    this.changed = changed;
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("input", () => {
      this.check();
      this.store();
      this.changed();
    });
    find("reset").addEventListener("click", () => {
      for (const field of this.fields.values()) field.input.value = "";
      this.form.dispatchEvent(new Event("input"));
    });
  }

  build(card) {
    const kept = JSON.parse(sessionStorage.getItem(STORED) ?? "{}");
    this.card = card;
    this.form.replaceChildren();
    this.fields.clear();
    for (const [name, step] of Object.entries(NUMBERS)) this.addNumber(name, card.arguments[name], step);
    this.addStop(card.stop);
    this.addAdapter(card);
    for (const [name, field] of this.fields) field.input.value = kept[name] ?? "";
    this.check();
  }

  setMode(mode) {
    this.mode = mode;
    const field = this.fields.get("max_tokens");
    if (field) field.input.placeholder = mode === "chat" ? "to the end" : String(this.card.completion_max_tokens);
  }

  /** What goes into the body; only what was filled in, so that the model's own values count for the rest. */
  values() {
    const values = {};
    for (const [name, field] of this.fields) {
      const value = field.read(field.input.value);
      if (value !== undefined) values[name] = value;
    }
    return values;
  }

  /** Whether all that was filled in is within its limits; what is not, says so. */
  check() {
    let first = null;
    for (const field of this.fields.values()) {
      const problem = field.problem(field.input);
      field.note.textContent = problem;
      field.note.hidden = !problem;
      field.input.setAttribute("aria-invalid", String(Boolean(problem)));
      if (problem) first ??= field.input;
    }
    this.firstBad = first;
    return first === null;
  }

  /** Leads to the first field that is beyond its limits. */
  reveal() {
    this.form.closest("details").open = true;
    if (this.firstBad.offsetParent === null) find("panel-toggle").click(); // on a phone they are behind a button
    this.firstBad.focus();
  }

  store() {
    const texts = Object.fromEntries([...this.fields].map(([name, field]) => [name, field.input.value]));
    sessionStorage.setItem(STORED, JSON.stringify(texts));
  }

  addNumber(name, limits, step) {
    const { minimum, exclusiveMinimum, maximum, type, help } = limits;
    const input = make("input", { type: "number", step: "any", inputMode: type === "integer" ? "numeric" : "decimal" });
    input.placeholder = limits.default ?? (name === "seed" ? "random" : name === "top_k" ? "all" : "");
    // Arrow keys go in steps from the value that counts without one.
    input.addEventListener("keydown", (event) => {
      if (!["ArrowUp", "ArrowDown"].includes(event.key)) return;
      event.preventDefault();
      const start = input.value === "" ? (limits.default ?? Math.max(minimum, 0)) : Number(input.value);
      const next = start + (event.key === "ArrowUp" ? step : -step);
      const lowest = minimum ?? exclusiveMinimum + step;
      input.value = Number(Math.min(maximum, Math.max(lowest, next)).toFixed(4));
      input.dispatchEvent(new Event("input", { bubbles: true }));
    });
    const isOpen = exclusiveMinimum !== undefined;
    const lower = isOpen ? `above ${exclusiveMinimum}` : String(minimum);
    const range = name === "seed" ? "a whole number" : maximum < UNLIMITED ? `${lower} to ${maximum}` : `${lower} or more`;
    const within = isOpen ? `${lower} and at most ${maximum}` : `from ${lower} to ${maximum}`;
    this.add(name, input, range, help, {
      read: (text) => (text === "" ? undefined : Number(text)),
      problem: (field) => {
        if (field.validity.badInput) return "This is not a number.";
        if (field.value === "") return "";
        const value = Number(field.value);
        if (type === "integer" && !Number.isInteger(value)) return "This has to be a whole number.";
        const isBelow = isOpen ? value <= exclusiveMinimum : value < minimum;
        return isBelow || value > maximum ? `This has to be ${within}.` : "";
      },
    });
  }

  addStop({ most, longest }) {
    const input = make("textarea", { rows: 1, spellcheck: false, placeholder: "none" });
    const texts = (value) => value.split("\n").filter((line) => line !== "");
    const range = `up to ${most}, one a line`;
    this.add("stop", input, range, "Texts before which the answer ends. \\n stands for a new line.", {
      read: (value) => (texts(value).length ? texts(value).map((line) => line.replaceAll("\\n", "\n")) : undefined),
      problem: (field) => {
        if (texts(field.value).length > most) return `There may be ${most}.`;
        return texts(field.value).some((line) => line.length > longest) ? `One may have ${longest} characters.` : "";
      },
    });
  }

  addAdapter({ adapters, adapter_prefixes: prefixes }) {
    if (!adapters.length && !prefixes.length) return;
    const rules = { key: "dynamic-lora", read: (value) => value || undefined, problem: () => "" };
    if (!prefixes.length) {
      const options = [make("option", { value: "" }, "none"), ...adapters.map((name) => make("option", {}, name))];
      this.add("adapter", make("select", {}, ...options), "", "A LoRA adapter to answer with.", rules);
      return;
    }
    const input = make("input", { type: "text", placeholder: "none", spellcheck: false, autocomplete: "off" });
    input.setAttribute("list", "adapter-names");
    const names = make("datalist", { id: "adapter-names" }, ...adapters.map((value) => make("option", { value })));
    const known = (value) => adapters.includes(value) || prefixes.some((prefix) => value.startsWith(prefix));
    const places = [...adapters, ...prefixes.map((prefix) => `${prefix}…`)].join(", ");
    this.add("adapter", input, "", `A LoRA adapter to answer with: ${places}`, {
      ...rules,
      problem: (field) => (field.value && !known(field.value) ? `This has to be one of ${places}` : ""),
    });
    this.form.append(names);
  }

  add(label, input, range, help, { key = label, read, problem }) {
    input.id = `argument-${label}`;
    input.title = help;
    const note = make("p", { className: "problem", id: `${input.id}-problem`, hidden: true });
    input.setAttribute("aria-describedby", `${input.id}-range ${note.id}`);
    const title = make("label", { htmlFor: input.id }, label);
    const limits = make("span", { className: "range", id: `${input.id}-range` }, range);
    this.form.append(make("div", { className: "field" }, title, limits, input, note));
    this.fields.set(key, { input, note, read, problem });
  }
}
