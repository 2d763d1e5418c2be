/* What every other module needs of the document. */

export const $ = (selector, root = document) => root.querySelector(selector);

export const clone = (template) => $(template).content.firstElementChild.cloneNode(true);

export const listen = (target, type, handler) => target.addEventListener(type, handler);

/** Tell those who don't see the page what has happened. */
export function announce(text) {
  $("#news").textContent = text;
}

/** Copy a text; return whether it worked. Pages without encryption have the old way only. */
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  const area = Object.assign(document.createElement("textarea"), { value: text, className: "unseen" });
  const focused = document.activeElement;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return done;
}
