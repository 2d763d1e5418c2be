/* One picture in the gallery: waiting, being drawn, done, or failed. */

import { announce, clone, copy, $, listen } from "./dom.js";
import { curlOf, pythonOf } from "./snippets.js";

const SECOND_MS = 1000;
const COPIED_MS = 1600;
const NO_BREAK = "\u00a0";

export class Card {
  #element = clone("#card");
  #url = "";
  #file = null;
  #recipe = null; // what draws this picture alone, again

  constructor(order, actions) {
    this.order = order;
    const root = this.#element;
    $(".words", root).textContent = order.fields.prompt;
    this.#shape(order.fields.size);
    if (order.fields.n > 1) $(".cancel", root).textContent = "Cancel all";
    const handlers = {
      ".cancel": () => actions.cancel(),
      ".again": (event) => event.currentTarget.ariaDisabled === "true" || actions.again(this),
      ".dismiss": () => actions.dismiss(this),
      ".reuse": () => actions.reuse(this.#recipe),
      ".edit": () => actions.edit(this.#file),
      ".picture": () => actions.view(this.#url, order.fields.prompt),
      ".curl": (event) => this.#copy(event.currentTarget, curlOf(this.#recipe)),
      ".python": (event) => this.#copy(event.currentTarget, pythonOf(this.#recipe)),
    };
    for (const [selector, handler] of Object.entries(handlers)) listen($(selector, root), "click", handler);
    this.state("Sending…");
  }

  get element() {
    return this.#element;
  }

  /** Give the plate the shape that the picture will have. */
  #shape(size) {
    const [width, height] = size.split("x").map(Number);
    $(".plate", this.#element).style.aspectRatio = height ? `${width} / ${height}` : "1";
  }

  state(text, share) {
    $(".state", this.#element).textContent = text;
    const bar = $("progress", this.#element);
    if (share === undefined) bar.removeAttribute("value");
    else bar.value = share;
  }

  /** Show a picture: one on its way, or the finished one. */
  show(file, event, alt) {
    this.drop();
    this.#file = file;
    this.#url = URL.createObjectURL(file);
    this.#shape(event.size);
    this.#element.classList.toggle("transparent", event.background === "transparent");
    Object.assign($(".picture img", this.#element), { src: this.#url, alt });
    $(".picture", this.#element).hidden = false;
  }

  finish(file, event, seconds) {
    const root = this.#element;
    const { fields, images } = this.order;
    this.#recipe = { fields: { ...fields, n: 1, size: event.size, seed: event.seed }, images };
    this.show(file, event, fields.prompt);
    $(".caption .prompt", root).textContent = fields.prompt;
    const figures = [
      event.size.replace("x", " × "),
      fields.num_inference_steps ? `${fields.num_inference_steps} steps` : "",
      `guidance ${fields.true_cfg_scale}`,
      `seed ${event.seed}`,
      images.length ? `${images.length} input image${images.length > 1 ? "s" : ""}` : "",
      `${seconds.toFixed(1)} s`,
    ].filter(Boolean).map((figure) => figure.replaceAll(" ", NO_BREAK));
    if (fields.negative_prompt) figures.push(`without “${fields.negative_prompt}”`);
    $(".params", root).textContent = figures.join(`${NO_BREAK}· `);
    $(".warnings", root).textContent = event.warnings.join(" ");
    Object.assign($(".download", root), { href: this.#url, download: file.name });
    this.#stop(".done", ".reuse");
    $(".picture", root).disabled = false;
  }

  /** Say why there is no picture, and offer to try again, after a while if the service says so. */
  end(message, { isFault = false, waitS = 0 }) {
    this.drop();
    this.#element.classList.toggle("failed", isFault);
    $(".plate", this.#element).style.aspectRatio = "";
    $(".picture", this.#element).hidden = true;
    $(".words", this.#element).textContent = message;
    this.#countDown(waitS);
    this.#stop(".undone", ".again");
  }

  #countDown(seconds) {
    const button = $(".again", this.#element);
    button.ariaDisabled = String(seconds > 0);
    button.textContent = seconds > 0 ? `Try again in ${seconds} s` : "Try again";
    if (seconds > 0) setTimeout(() => this.#countDown(seconds - 1), SECOND_MS);
  }

  /** Let go of the picture. */
  drop() {
    URL.revokeObjectURL(this.#url);
    this.#url = "";
  }

  /** Nothing is under way any more. Who had the focus on the cancel button gets the first one of those that follow. */
  #stop(shown, focused) {
    const root = this.#element;
    const hadFocus = $(".going", root).contains(document.activeElement);
    root.setAttribute("aria-busy", "false");
    $(".going", root).hidden = true;
    for (const part of root.querySelectorAll(shown)) part.hidden = false;
    if (hadFocus) $(focused, root).focus();
  }

  async #copy(button, text) {
    const label = button.dataset.label ??= button.textContent;
    const done = await copy(text);
    button.textContent = done ? "Copied" : "Not copied";
    announce(done ? "Copied." : "The browser did not let it be copied.");
    setTimeout(() => { button.textContent = label; }, COPIED_MS);
  }
}
