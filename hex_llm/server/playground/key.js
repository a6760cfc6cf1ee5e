// The dialog that asks for an API key.

import { key } from "./api.js";
import { find } from "./dom.js";

export class KeyDialog {
  /** `given` is called when there is a new key to try. */
  constructor(given) {
    this.dialog = find("key-dialog");
    find("key-open").addEventListener("click", () => this.ask());
    find("key-cancel").addEventListener("click", () => this.dialog.close());
    find("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      key.set(find("key").value.trim());
      this.dialog.close();
      given();
    });
  }

  ask(problem = "") {
    find("key-open").hidden = false;
    find("key-error").textContent = problem;
    find("key-error").hidden = !problem;
    find("key").value = key.get();
    if (!this.dialog.open) this.dialog.showModal();
    find("key").focus();
  }
}
