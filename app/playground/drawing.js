/* A request from the form to its last event. Each of its pictures has a card from the start. */

import { ServiceError, call, eventsOf, fileOf, newRequestId } from "./api.js";

const CANCEL_MS = 2000;
const STREAM = { stream: true, partial_images: 3, stream_options: { include_progress: true } };

/** A file as the data URL that a request carries. (A form would change the line ends of the prompt.) */
function dataUrlOf(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new ServiceError("An input image can't be read any more. Please add it again."));
    reader.readAsDataURL(file);
  });
}

async function bodyOf({ fields, images }) {
  const urls = await Promise.all(images.map(dataUrlOf));
  const inputs = urls.length ? { images: urls.map((url) => ({ image_url: url })) } : {};
  return JSON.stringify({ ...fields, ...inputs, ...STREAM });
}

const remaining = (seconds) => (seconds < 90 ? `${Math.max(1, Math.round(seconds))} s` : `${Math.round(seconds / 60)} min`);

/** Where a request is, in words, and as a share of its steps. */
function stateOf({ status, position, step, num_steps: numSteps, eta_seconds: eta }) {
  if (status === "queued") return { text: position <= 1 ? "Next in the queue" : `Number ${position} in the queue`, share: 0 };
  return { text: `Step ${step} of ${numSteps} · about ${remaining(eta)} left`, share: step / numSteps };
}

export class Drawing {
  #id = newRequestId();
  #leaving = new AbortController();
  #startedMs = performance.now();
  #isRunning = false;
  #isCancelled = false;

  constructor(order, cards) {
    this.order = order;
    this.cards = cards;
    this.open = new Set(cards); // those without their picture
  }

  /** What is left of the order: picture i has seed + i, and they are finished in that order. */
  get rest() {
    const { fields, images } = this.order;
    const numDone = this.cards.length - this.open.size;
    const seed = fields.seed === undefined ? {} : { seed: (fields.seed + numDone) % 2 ** 32 };
    return { fields: { ...fields, ...seed, n: this.open.size }, images };
  }

  /** Ask the service to stop, then hang up, which would stop it too. */
  async cancel() {
    this.#isCancelled = true;
    try {
      // A browser keeps few connections to one server: with many drawings under way this one may get none.
      await call(`v1/images/requests/${this.#id}`, { method: "DELETE", signal: AbortSignal.timeout(CANCEL_MS) });
    } catch { /* it has not begun, or is over */ }
    this.#leaving.abort();
  }

  /** Draw. `onStart` is called when the service begins with it. Throws `ServiceError`; cancelled, it just returns. */
  async run({ onStart, onPicture }) {
    const endpoint = `v1/images/${this.order.images.length ? "edits" : "generations"}`;
    try {
      const response = await call(endpoint, {
        method: "POST",
        body: await bodyOf(this.order),
        headers: { "content-type": "application/json", "x-request-id": this.#id },
        signal: this.#leaving.signal,
      });
      for await (const event of eventsOf(response)) {
        if (event.type === "error") throw new ServiceError(event.error.message);
        this.#take(event, onStart, onPicture);
      }
      if (this.open.size) throw new ServiceError("The connection was lost.");
    } catch (error) {
      if (!this.#isCancelled) throw error;
    }
  }

  #take(event, onStart, onPicture) {
    const card = this.cards[event.image_index ?? 0];
    if (event.type.endsWith(".progress")) {
      const { text, share } = stateOf(event);
      for (const waiting of this.open) waiting.state(text, share);
      if (event.status === "running" && !this.#isRunning) onStart();
      this.#isRunning = event.status === "running";
    } else if (event.type.endsWith(".partial_image")) {
      card.show(fileOf(event), event, "The picture as it will probably become");
    } else if (event.type.endsWith(".completed")) {
      card.finish(fileOf(event), event, (performance.now() - this.#startedMs) / 1000);
      this.open.delete(card);
      onPicture(card);
    }
  }
}
