// A turn: what the user said, what the model answered, and what that took. It draws itself.

import { ApiError, stream } from "./api.js";
import { copy, make } from "./dom.js";

export class Turn {
  /** `ask` gives the path and the body of the request anew each time that it is made. */
  constructor(mode, said, ask) {
    this.mode = mode;
    this.said = said;
    this.ask = ask;
    this.answer = "";
    this.state = "waiting"; // then done, stopped or failed
    this.text = make("div", { className: "text" });
    this.facts = make("div", { className: "measures" });
    this.retry = make("button", { type: "button", className: "quiet small" }, "Retry");
    this.copying = make("button", { type: "button", className: "quiet small" }, "Copy");
    this.copying.addEventListener("click", () => copy(this.answer, this.copying));
    this.actions = make("div", { className: "foot" }, this.facts, make("span", { className: "spacer" }), this.copying, this.retry);
    const names = mode === "chat" ? ["You", "Model"] : ["Prompt", "Completion"];
    this.answered = make("article", { className: "answer" }, make("h2", {}, names[1]), this.text, this.actions);
    const saying = make("article", { className: "said" }, make("h2", {}, names[0]), make("div", { className: "text" }, said));
    this.element = make("div", { className: "turn" }, saying, this.answered);
  }

  /** Whether it belongs to the conversation that the next request has. */
  get counts() {
    return (this.state === "done" || this.state === "stopped") && this.answer !== "";
  }

  stop() {
    this.abort?.abort();
  }

  /** Makes the request and shows its answer as it comes. `grown` is called whenever there is more to see. */
  async run(grown) {
    this.abort = new AbortController();
    this.answer = "";
    this.usage = null;
    this.reason = null;
    this.begin();
    const started = performance.now();
    let first = null;
    let last = null;
    try {
      const { path, body } = this.ask();
      // The usage comes with every piece, so that an answer that is stopped has one, too.
      const options = { include_usage: true, continuous_usage_stats: true };
      for await (const chunk of stream(path, { ...body, stream: true, stream_options: options }, this.abort.signal)) {
        this.usage = chunk.usage ?? this.usage;
        const [choice] = chunk.choices;
        if (!choice) continue;
        last = performance.now();
        first ??= last;
        this.reason = choice.finish_reason ?? this.reason;
        this.append(choice.delta?.content ?? choice.text ?? "");
        grown();
      }
      this.state = "done";
    } catch (error) {
      if (error.name === "AbortError") this.state = "stopped";
      else this.fail(error instanceof ApiError ? error : new ApiError(0, error));
    }
    this.end(started, first, last);
    grown();
  }

  begin() {
    this.state = "waiting";
    this.text.replaceChildren();
    this.facts.replaceChildren();
    this.answered.classList.remove("failed");
    // Whoever has it read to them hears the answer when it is whole, and not token by token.
    this.answered.setAttribute("aria-busy", "true");
    this.actions.hidden = true;
  }

  append(text) {
    if (!text) return;
    this.answer += text;
    this.text.append(text);
  }

  fail(error) {
    this.state = "failed";
    this.answered.classList.add("failed");
    const message = make("p", { className: "problem" }, error.message);
    message.setAttribute("role", "alert");
    this.text.append(message);
  }

  end(started, first, last) {
    this.text.normalize();
    this.answered.removeAttribute("aria-busy");
    this.actions.hidden = false;
    this.copying.hidden = !this.answer;
    this.facts.replaceChildren(...this.measures(started, first, last).map((each) => make("span", {}, each)));
  }

  measures(started, first, last) {
    const measures = [];
    if (this.usage) {
      const { prompt_tokens: prompt, completion_tokens: tokens, prompt_tokens_details: details } = this.usage;
      measures.push(`${tokens} ${tokens === 1 ? "token" : "tokens"}`);
      // The first one is what TTFT is about; the others come one after the other.
      if (tokens > 1 && last > first) measures.push(`${(((tokens - 1) * 1000) / (last - first)).toFixed(1)} tokens/s`);
      if (first !== null) measures.push(`TTFT ${time(first - started)}`);
      measures.push(`${details?.cached_tokens ?? 0} of ${prompt} prompt tokens cached`);
    }
    if (this.state === "stopped") measures.push("stopped");
    else if (this.reason === "length") measures.push("ended at max_tokens");
    return measures;
  }
}

const time = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`);
