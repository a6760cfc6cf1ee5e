// Puts the parts together: finds out what is served, and then lets the user at it.

import { get, key } from "./api.js";
import { Arguments } from "./arguments.js";
import { showCard } from "./card.js";
import { curl, python } from "./code.js";
import { copy, find } from "./dom.js";
import { EngineView } from "./engine.js";
import { KeyDialog } from "./key.js";
import { Talk } from "./talk.js";

const AGAIN_MS = 1000;

const engine = new EngineView(connect);
const args = new Arguments(showCode);
const talk = new Talk(args, showCode);
const keys = new KeyDialog(connect);
const language = () => document.querySelector("input[name=language]:checked").value;

/** Until the server is ready to be asked; where it wants a key, until it has one. */
async function connect() {
  try {
    const card = await (await get("/playground/card.json")).json();
    showCard(card);
    args.build(card);
    talk.start(card);
    engine.start(card);
    find("key-open").hidden = !key.get();
    say("ready", "ready");
    // On a phone the keyboard would cover half of the page.
    if (document.activeElement === document.body && matchMedia("(min-width: 861px)").matches) find("input").focus();
  } catch (error) {
    if (error.status === 401) {
      say("locked", "needs a key");
      keys.ask(key.get() ? error.message : "");
      return;
    }
    if (error.code === "starting") say("starting", await progress());
    else say("away", error.message);
    setTimeout(connect, AGAIN_MS);
  }
}

async function progress() {
  try {
    const response = await fetch("/ping", { cache: "no-store" }); // its status says that it is not ready, too
    const { phase, progress: done } = await response.json();
    return `${phase || "starting"} ${Math.round((done ?? 0) * 100)} %`;
  } catch {
    return "starting"; // it was there a moment ago
  }
}

function say(state, text) {
  const status = find("status");
  status.dataset.state = state;
  if (status.textContent !== text) status.textContent = text;
}

function showCode() {
  if (!talk.card) return;
  const last = talk.turns[talk.mode].at(-1);
  // What is about to be sent; where nothing is, what was sent last.
  const { path, body } = find("input").value || !last ? talk.request(find("input").value) : last.ask();
  const write = language() === "curl" ? curl : python;
  find("code").textContent = write(path, { ...body, stream: true }, key.get() !== "");
}

function togglePanel() {
  const open = document.body.classList.toggle("panel-open");
  find("panel-toggle").setAttribute("aria-expanded", String(open));
  find("panel-toggle").textContent = open ? "Close" : "Settings";
}

find("panel-toggle").addEventListener("click", togglePanel);
find("copy").addEventListener("click", () => copy(find("code").textContent, find("copy")));
for (const radio of document.getElementsByName("language")) radio.addEventListener("change", showCode);
talk.show();
connect();
