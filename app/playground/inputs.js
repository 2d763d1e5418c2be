/* The images to start from: chosen, dropped or pasted; their order is the order in which they are sent. */

import { $, clone, listen } from "./dom.js";

const TYPES = ["image/png", "image/jpeg", "image/webp"];

export class Inputs {
  max = 4;
  #images = []; // {file, url}

  constructor(onChange) {
    this.onChange = onChange;
    listen($("#add-images"), "click", () => $("#files").click());
    listen($("#files"), "change", (event) => {
      this.add(event.target.files);
      event.target.value = "";
    });
    listen(document, "paste", (event) => {
      if (!event.clipboardData.types.includes("text/plain")) this.#take(event, event.clipboardData);
    });
    listen(document, "dragover", (event) => {
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault();
      $("#tray").classList.add("over");
    });
    listen(document, "dragleave", (event) => event.relatedTarget ?? $("#tray").classList.remove("over"));
    listen(document, "drop", (event) => {
      $("#tray").classList.remove("over");
      this.#take(event, event.dataTransfer);
    });
  }

  get files() {
    return this.#images.map(({ file }) => file);
  }

  add(files) {
    const usable = [...files].filter((file) => TYPES.includes(file.type));
    const room = this.max - this.#images.length;
    let fault = usable.length < files.length ? "Only PNG, JPEG and WebP images can be used." : "";
    if (usable.length > room) fault = `No more than ${this.max} images can be used.`;
    for (const file of usable.slice(0, room)) this.#images.push({ file, url: URL.createObjectURL(file) });
    this.#show(fault);
  }

  replace(files) {
    for (const { url } of this.#images) URL.revokeObjectURL(url);
    this.#images = [];
    this.add(files);
  }

  #take(event, transfer) {
    if (!transfer.files.length) return; // a text, which goes where it is meant to
    event.preventDefault();
    this.add(transfer.files);
  }

  #remove(index) {
    const [{ url }] = this.#images.splice(index, 1);
    URL.revokeObjectURL(url);
    this.#show();
    ($("#thumbs").children[index]?.querySelector(".remove") ?? $("#add-images")).focus();
  }

  #moveUp(index) {
    this.#images.splice(index - 1, 0, ...this.#images.splice(index, 1));
    this.#show();
    const { children } = $("#thumbs");
    (index > 1 ? children[index - 1].querySelector(".move") : children[0].querySelector(".remove")).focus();
  }

  #show(fault = "") {
    $("#thumbs").replaceChildren(...this.#images.map(({ url }, index) => {
      const thumb = clone("#thumb");
      Object.assign(thumb.querySelector("img"), { src: url, alt: `Image ${index + 1}` });
      const [move, remove] = thumb.querySelectorAll("button");
      move.setAttribute("aria-label", `Move image ${index + 1} one place forward`);
      remove.setAttribute("aria-label", `Remove image ${index + 1}`);
      listen(move, "click", () => this.#moveUp(index));
      listen(remove, "click", () => this.#remove(index));
      return thumb;
    }));
    $("#add-images").hidden = this.#images.length >= this.max;
    $("#images-error").textContent = fault;
    this.onChange();
  }
}
