/* The sizes on offer: shapes of the model's own area, on its own grid, and whatever else its limits allow. */

import { $, clone, listen } from "./dom.js";

const RATIOS = [[1, 1], [3, 2], [16, 9], [4, 5], [2, 3], [9, 16]];
const FRAME_PX = 18;

const times = (width, height) => `${width} × ${height}`;

function fitted([across, down], card) {
  const { native_multiple: grid } = card.sizes;
  const onGrid = (side) => Math.max(grid, Math.round(side / grid) * grid);
  const scale = card.default_resolution / Math.sqrt(across * down);
  return { name: `${across}:${down}`, width: onGrid(across * scale), height: onGrid(down * scale) };
}

export class Sizes {
  #card = null;
  #hasImages = false;

  /** Offer what the model's card allows; keep what is chosen. */
  offer(card) {
    const chosen = this.#card ? this.value : null;
    this.#card = card;
    const shapes = [
      { name: "Auto", value: "auto" },
      ...RATIOS.map((ratio) => fitted(ratio, card)).filter((shape) => !this.faultOf(shape.width, shape.height)),
      { name: "Custom", value: "custom" },
    ];
    $("#shapes").replaceChildren(...shapes.map((shape) => this.#option(shape)));
    for (const id of ["#width", "#height"]) {
      Object.assign($(id), { min: card.sizes.min_side, max: card.sizes.max_side, value: card.default_resolution });
    }
    this.value = chosen ?? "auto";
  }

  #option(shape) {
    const option = clone("#shape");
    const [input, picture] = [$("input", option), $(".frame > span", option)];
    input.value = shape.value ?? `${shape.width}x${shape.height}`;
    $(".name", option).textContent = shape.name;
    const [width, height] = shape.width ? [shape.width, shape.height] : [3, 3];
    picture.style.width = `${FRAME_PX * Math.min(1.25, Math.sqrt(width / height))}px`;
    picture.style.height = `${FRAME_PX * Math.min(1.25, Math.sqrt(height / width))}px`;
    picture.classList.toggle("free", !shape.width);
    listen(input, "change", () => this.show());
    return option;
  }

  get #checked() {
    return $("#shapes input:checked")?.value ?? "auto";
  }

  get value() {
    return this.#checked === "custom" ? `${$("#width").value}x${$("#height").value}` : this.#checked;
  }

  set value(size) {
    const option = [...document.querySelectorAll("#shapes input")].find((input) => input.value === size);
    (option ?? $("#shapes input[value=custom]")).checked = true;
    if (!option) [$("#width").value, $("#height").value] = size.split("x");
    this.show();
  }

  /** Show what the choice comes to. */
  show(hasImages = this.#hasImages) {
    this.#hasImages = hasImages;
    if (!this.#card) return;
    const side = this.#card.default_resolution;
    const auto = hasImages ? "the shape of the last image" : times(side, side);
    $("#size-px").textContent = { auto, custom: "" }[this.#checked] ?? this.#checked.replace("x", " × ");
    $("#custom-size").hidden = this.#checked !== "custom";
  }

  /** What is wrong with the choice, in words; nothing if it is fine. */
  get fault() {
    return this.#checked === "custom" ? this.faultOf($("#width").valueAsNumber, $("#height").valueAsNumber) : "";
  }

  faultOf(width, height) {
    const { min_side: min, max_side: max, max_pixels: pixels, max_aspect: aspect } = this.#card.sizes;
    if (![width, height].every((side) => Number.isInteger(side) && side >= min && side <= max)) {
      return `Each side has ${min} to ${max} pixels.`;
    }
    if (width * height > pixels) return `Width × height is at most ${pixels.toLocaleString("en")} pixels.`;
    if (Math.max(width, height) > aspect * Math.min(width, height)) return `One side is at most ${aspect} times the other.`;
    return "";
  }
}
