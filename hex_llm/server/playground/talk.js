// The conversation, or the completions: a list of turns for each mode, and the field that begins the next one.

import { find } from "./dom.js";
import { Turn } from "./turn.js";

const WORDS = {
  chat: { path: "/v1/chat/completions", label: "Message", hint: "Ask the model something", title: "Talk to the model" },
  completion: { path: "/v1/completions", label: "Prompt", hint: "A text to go on with", title: "Have the model go on with a text" },
};

export class Talk {
  constructor(args, changed) {
    this.args = args;
    this.changed = changed;
    this.mode = "chat";
    this.turns = { chat: [], completion: [] };
    this.current = null; // the turn that is being answered
    this.ready = false;
    this.input = find("input");
    this.scroll = find("scroll");
    this.bind();
  }

  bind() {
    find("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    this.input.addEventListener("input", () => {
      this.fit();
      this.changed();
    });
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.stop());
    find("stop").addEventListener("click", () => {
      this.stop();
      this.input.focus();
    });
    find("clear").addEventListener("click", () => {
      this.stop();
      this.turns[this.mode] = [];
      this.show();
      this.input.focus();
    });
    for (const radio of document.getElementsByName("mode")) {
      radio.addEventListener("change", () => this.setMode(radio.value));
    }
  }

  /** Once the server is there, and again when it has come back: what has been said stays. */
  start(card) {
    const isFirst = !this.card;
    this.card = card;
    this.ready = true;
    const chat = document.querySelector("input[name=mode][value=chat]");
    chat.disabled = !card.has_chat;
    chat.parentElement.title = card.has_chat ? "" : "The model has no chat template.";
    if (!card.has_chat && this.mode === "chat") this.setMode("completion");
    else if (isFirst) this.setMode(this.mode);
    else this.args.setMode(this.mode);
  }

  setMode(mode) {
    this.stop();
    this.mode = mode;
    for (const radio of document.getElementsByName("mode")) radio.checked = radio.value === mode;
    find("input-label").textContent = WORDS[mode].label;
    this.input.placeholder = WORDS[mode].hint;
    find("empty-title").textContent = WORDS[mode].title;
    find("empty-hint").textContent =
      mode === "chat" ? "Each message goes out with those before it." : "The prompt goes to the model as it is, without a chat template.";
    this.args.setMode(mode);
    this.show();
  }

  /** The request that would be sent with this text; `before` are the turns that it follows. */
  request(text, before = this.turns[this.mode]) {
    const body = { model: this.card.names[0] };
    if (this.mode === "chat") {
      const messages = before.filter((turn) => turn.counts).flatMap((turn) => [
        { role: "user", content: turn.said },
        { role: "assistant", content: turn.answer },
      ]);
      body.messages = [...messages, { role: "user", content: text }];
    } else {
      body.prompt = text;
    }
    // The server keeps the prefixes of different salts apart, and wants one: this tab's own.
    if (this.card.needs_salt) body.cache_salt = salt();
    return { path: WORDS[this.mode].path, body: { ...body, ...this.args.values() } };
  }

  send() {
    const said = this.mode === "chat" ? this.input.value.trim() : this.input.value;
    if (!said || !this.ready || this.current) return;
    if (!this.args.check()) {
      this.args.reveal();
      return;
    }
    const turns = this.turns[this.mode];
    const turn = new Turn(this.mode, said, () => this.request(said, turns.slice(0, turns.indexOf(turn))));
    turn.retry.addEventListener("click", () => this.args.check() ? this.run(turn) : this.args.reveal());
    turns.push(turn);
    this.input.value = "";
    this.fit();
    this.show();
    this.run(turn);
  }

  async run(turn) {
    this.current = turn;
    this.show();
    this.scroll.scrollTop = this.scroll.scrollHeight;
    await turn.run(() => this.follow());
    if (this.current === turn) this.current = null;
    this.show();
    this.follow();
  }

  stop() {
    this.current?.stop();
  }

  /** Keeps the end in sight, unless the reader has gone back. */
  follow() {
    const { scrollHeight, scrollTop, clientHeight } = this.scroll;
    if (scrollHeight - scrollTop - clientHeight < 120) this.scroll.scrollTop = scrollHeight;
  }

  /** The field is as high as its text, within reason. */
  fit() {
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(this.input.scrollHeight + 2, 240)}px`;
  }

  show() {
    const turns = this.turns[this.mode];
    const list = find("turns");
    const elements = turns.map((turn) => turn.element);
    // Only what is new: a list that is put in anew would be read out anew.
    for (const child of [...list.children]) if (!elements.includes(child)) child.remove();
    for (const element of elements) if (element.parentElement !== list) list.append(element);
    for (const turn of turns) turn.retry.hidden = turn !== turns.at(-1) || this.current !== null;
    find("empty").hidden = turns.length > 0;
    find("clear").disabled = turns.length === 0;
    find("send").hidden = this.current !== null;
    find("send").disabled = !this.ready;
    find("stop").hidden = this.current === null;
    this.changed();
  }
}

function salt() {
  const stored = sessionStorage.getItem("hex-llm-salt");
  if (stored) return stored;
  const made = [...crypto.getRandomValues(new Uint32Array(4))].map((each) => each.toString(16)).join("");
  sessionStorage.setItem("hex-llm-salt", made);
  return made;
}
