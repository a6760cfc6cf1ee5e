// Short words for what the DOM spells out.

export const find = (id) => document.getElementById(id);

/** An element with these properties and children. Text is text: nothing is ever read as HTML. */
export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** Puts a text on the clipboard, and says so on the button for a moment. */
export async function copy(text, button) {
  const label = button.textContent;
  button.textContent = (await put(text)) ? "Copied" : "Not copied";
  setTimeout(() => (button.textContent = label), 1500);
}

async function put(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return putBySelection(text); // pages that came over plain http have no clipboard of their own
  }
}

function putBySelection(text) {
  const area = make("textarea", { value: text, className: "hidden" });
  const focused = document.activeElement;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return done;
}
