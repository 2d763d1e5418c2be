/* Talks to the service: errors as exceptions, and the events of a stream. Paths are relative, so that the page works
   behind a proxy that puts it into a folder. Of a key it knows nothing: the browser sends what it was let in with. */

const NO_CONNECTION = 0; // in place of a status

/** What the service, or the way to it, has against a request; the message is for people. */
export class ServiceError extends Error {
  constructor(message, { status = null, retryAfterS = 0 } = {}) {
    super(message);
    this.status = status;
    this.retryAfterS = retryAfterS;
  }

  get isAway() {
    return this.status === NO_CONNECTION || this.status === 503;
  }
}

async function refusal(response) {
  const { status } = response;
  const retryAfterS = Number(response.headers.get("retry-after")) || 0;
  if (status === 401) return new ServiceError("The key is no longer accepted. Reload the page to enter one.", { status });
  let message = `The server answered with status ${status}.`;
  try {
    const body = await response.json();
    message = body.error?.message ?? body.reason ?? message;
  } catch { /* a proxy's page, most likely */ }
  return new ServiceError(message, { status, retryAfterS });
}

/** Send a request; return the response if it is a success. Throws `ServiceError`, or `AbortError` for its signal. */
export async function call(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServiceError("The server can't be reached.", { status: NO_CONNECTION });
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

/** The data of each event of a stream. A line may be megabytes long, so each is put together once. */
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pieces = [];
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((error) => {
        if (error.name === "AbortError") throw error;
        throw new ServiceError("The connection was lost.", { status: NO_CONNECTION });
      });
      if (done) return;
      const [first, ...others] = value.split("\n");
      pieces.push(first);
      for (const start of others) {
        const line = pieces.join("");
        if (line.startsWith("data:")) yield JSON.parse(line.slice(5));
        pieces = [start];
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** A picture as a file, from an event. */
export function fileOf({ b64_json: base64, output_format: format, seed }) {
  const bytes = Uint8Array.fromBase64?.(base64) ?? Uint8Array.from(atob(base64), (char) => char.charCodeAt(0));
  return new File([bytes], `easel-${seed ?? "preview"}.${format}`, { type: `image/${format}` });
}

/** An id for `x-request-id`. (`randomUUID` is there on encrypted pages only.) */
export function newRequestId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return `page_${Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}
