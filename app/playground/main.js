/* The page. The form makes an order, {fields, images}; a drawing sends it and reads the events of the answer; each of
   its pictures is a card in the gallery, which shows the events and, in the end, what draws that picture again. Nothing
   is kept but in the page itself. */

import { call } from "./api.js";
import { Card } from "./card.js";
import { $, announce, listen } from "./dom.js";
import { Drawing } from "./drawing.js";
import { Form } from "./form.js";
import { describeAccess } from "./snippets.js";

const LOADING_MS = 2000;
const DEMO = "easel-demo";
const IDEAS = {
  shapes: [
    "a red circle and a blue star on a white background",
    "a large yellow heart in the middle, on a checkered green and black background",
    "a green ring on a transparent background",
  ],
  anything: [
    "A lighthouse on a basalt cliff at dusk, fog coming in from the sea, long exposure",
    "A poster for a night train, flat colours, the words “Slow is fine” in a wide serif",
    "A botanical plate of a lemon branch with blossoms, ink and watercolour on laid paper",
  ],
};

const form = new Form(draw);

function draw(order) {
  const cards = Array.from({ length: order.fields.n }, () => new Card(order, actions(() => drawing)));
  const drawing = new Drawing(order, cards);
  $("#gallery").prepend(...cards.map((card) => card.element));
  $("#blank").hidden = true;
  cards[0].element.scrollIntoView({ block: matchMedia("(max-width: 55.99rem)").matches ? "start" : "nearest" });
  announce("Sent.");
  follow(drawing);
}

async function follow(drawing) {
  try {
    await drawing.run({
      onStart: () => announce("Being drawn."),
      onPicture: (card) => announce(`Finished: ${card.order.fields.prompt}`),
    });
    end(drawing, "Cancelled.");
  } catch (error) {
    end(drawing, error.message, { isFault: true, waitS: error.retryAfterS });
    if (error.isAway) meet();
  }
}

/** Of the pictures that will not come, the first card says why, for all of them. */
function end(drawing, message, options = {}) {
  const [first, ...others] = drawing.open;
  if (!first) return;
  first.end(message, options);
  for (const card of others) remove(card);
  announce(message);
}

function actions(drawingOf) {
  return {
    cancel: () => drawingOf().cancel(),
    again: (card) => {
      remove(card);
      draw(drawingOf().rest);
      $("#results").focus({ preventScroll: true });
    },
    dismiss: (card) => {
      remove(card);
      $("#results").focus({ preventScroll: true });
    },
    reuse: (recipe) => form.write(recipe),
    edit: (file) => {
      form.inputs.add([file]);
      form.focus();
    },
    view: (url, alt) => {
      Object.assign($("#viewed"), { src: url, alt });
      $("#viewer").showModal();
    },
  };
}

function remove(card) {
  card.drop();
  card.element.remove();
  $("#blank").hidden = $("#gallery").childElementCount > 0;
}

function service(state, text) {
  document.body.dataset.service = state;
  $("#service").textContent = text;
  $("#draw").disabled = state !== "ready";
}

/** Ask for the model's card until there is one. */
async function meet() {
  try {
    const { data: [model] } = await (await call("v1/models")).json();
    form.describe(model.capabilities);
    describeAccess(model.capabilities);
    suggest(model.id);
    service("ready", model.id);
  } catch (error) {
    service(error.status === 503 ? "loading" : "fault", error.message);
    if (error.status !== 401) setTimeout(meet, LOADING_MS);
  }
}

function suggest(model) {
  $("#demo-note").hidden = model !== DEMO;
  $("#ideas").replaceChildren(...IDEAS[model === DEMO ? "shapes" : "anything"].map((idea) => {
    const button = Object.assign(document.createElement("button"), { type: "button", className: "idea", textContent: idea });
    listen(button, "click", () => {
      $("#prompt").value = idea;
      form.focus();
    });
    const item = document.createElement("li");
    item.append(button);
    return item;
  }));
}

listen($("#viewer"), "click", (event) => event.target === $("#viewed") || $("#viewer").close());

service("loading", "Connecting…");
meet();
