/* The form: what it holds as the fields of a request, and what is wrong with it in words. */

import { $, listen } from "./dom.js";
import { Inputs } from "./inputs.js";
import { Sizes } from "./sizes.js";

const isInteger = (low, high) => (value) => Number.isInteger(value) && value >= low && value <= high;
const isNumber = (low, high) => (value) => value >= low && value <= high;

export class Form {
  sizes = new Sizes();
  inputs = new Inputs(() => this.sizes.show(this.inputs.files.length > 0));
  #card = null;

  constructor(onSubmit) {
    listen($("#order"), "submit", (event) => {
      event.preventDefault();
      const order = $("#draw").disabled ? null : this.read();
      if (order) onSubmit(order);
    });
    listen($("#order"), "keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("#order").requestSubmit($("#draw"));
    });
    listen($("#clear-seed"), "click", () => {
      $("#seed").value = "";
      $("#seed").focus();
    });
    if (navigator.platform.startsWith("Mac")) $("#shortcut").textContent = "⌘ ↵";
  }

  /** Take limits and defaults from the model's card; what has been typed stays. */
  describe(card) {
    const isFirst = this.#card === null;
    this.#card = card;
    this.inputs.max = card.max_input_images;
    $("#max-images").textContent = card.max_input_images;
    $("#count").max = card.max_images;
    $("#steps").disabled = card.fixed_num_steps;
    $("#steps").title = card.fixed_num_steps ? "This model has its own steps." : "";
    if (isFirst || card.fixed_num_steps) $("#steps").value = card.default_num_inference_steps;
    if (isFirst) $("#guidance").value = card.default_true_cfg_scale;
    this.sizes.offer(card);
  }

  /** The request, or nothing: then the faults are shown, and the first one has the focus. */
  read() {
    const [steps, guidance, count] = ["#steps", "#guidance", "#count"].map((id) => $(id).valueAsNumber);
    const seed = $("#seed").valueAsNumber;
    const numbers = [
      ["#steps", isInteger(1, 200)(steps), "Steps are a whole number from 1 to 200."],
      ["#guidance", isNumber(0, 20)(guidance), "Guidance is a number from 0 to 20."],
      ["#count", isInteger(1, this.#card.max_images)(count), `Pictures are a whole number from 1 to ${this.#card.max_images}.`],
    ];
    const hasSeed = $("#seed").value !== "" || $("#seed").validity.badInput;
    const faults = [
      this.#mark("prompt", [["#prompt", $("#prompt").value.trim() !== "", "Say what to draw."]]),
      this.#mark("size", [["#width", !this.sizes.fault, this.sizes.fault]]),
      this.#mark("numbers", numbers),
      this.#mark("seed", [["#seed", !hasSeed || isInteger(0, 2 ** 32 - 1)(seed), "A seed is a whole number from 0 to 4294967295."]]),
    ];
    const first = faults.find((field) => field);
    if (first) {
      first.focus();
      return null;
    }
    const fields = { prompt: $("#prompt").value, size: this.sizes.value, n: count, true_cfg_scale: guidance };
    if (!this.#card.fixed_num_steps) fields.num_inference_steps = steps;
    if (hasSeed) fields.seed = seed;
    const negative = $("#negative").value.trim();
    if (negative || guidance > 1) fields.negative_prompt = negative; // an empty one guides, too; none does not
    return { fields, images: this.inputs.files };
  }

  /** Show the faults of a group of fields; return the first field at fault. */
  #mark(group, checks) {
    const wrong = checks.filter(([, isRight]) => !isRight);
    for (const [id, isRight] of checks) $(id).setAttribute("aria-invalid", String(!isRight));
    $(`#${group}-error`).textContent = wrong.map(([, , message]) => message).join(" ");
    return wrong.length ? $(wrong[0][0]) : null;
  }

  /** Put a request back into the form. */
  write({ fields, images }) {
    $("#prompt").value = fields.prompt;
    $("#negative").value = fields.negative_prompt ?? "";
    $("#count").value = fields.n;
    $("#guidance").value = fields.true_cfg_scale;
    $("#seed").value = fields.seed ?? "";
    if (fields.num_inference_steps) $("#steps").value = fields.num_inference_steps;
    this.inputs.replace(images);
    this.sizes.value = fields.size;
    this.focus();
  }

  focus() {
    $("#prompt").focus({ preventScroll: true });
    $("#order").scrollIntoView({ block: "start" });
    $("#order").scrollTop = 0;
  }
}
