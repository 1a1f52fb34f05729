// Fetches data that is not in the view (history, waste, details of a GPU), and refreshes it when it
// is old.

import { plain } from "./dom.js";

const PATIENCE_MS = 20_000;
const AGAIN_SECONDS = 15; // time until a retry after a failure

/** @typedef {{ state: string, data?: any, message?: string }} Answer */

export class Question {
  // `onAnswer` is called when there is new data.
  constructor(onAnswer) {
    this.onAnswer = onAnswer;
    this.forget();
  }

  // Cancels the request.
  forget() {
    this.request?.abort();
    this.request = undefined;
    this.url = undefined;
    /** @type {Answer} */
    this.answer = { state: "waiting" };
    this.askedAt = -Infinity;
  }

  // Returns the current answer. Its `state` is waiting, ready (with `data`), missing (the server
  // does not have it) or failed; the latter two have a `message`. The previous answer is returned
  // until a newer one arrives.
  want(url, everySeconds) {
    if (url !== this.url) {
      this.forget();
      this.url = url;
    }
    const pause = this.answer.state === "ready" ? everySeconds : AGAIN_SECONDS;
    const isOld = performance.now() - this.askedAt > pause * 1000;
    if (isOld && !this.request) this.ask(url);
    return this.answer;
  }

  async ask(url) {
    const request = new AbortController();
    this.request = request;
    this.askedAt = performance.now();
    const signal = AbortSignal.any([request.signal, AbortSignal.timeout(PATIENCE_MS)]);
    const answer = await answerOf(url, signal);

    const isReplaced = this.request !== request;
    if (isReplaced) return;
    this.request = undefined;
    // Old data is better than none.
    if (answer.state === "failed" && this.answer.state === "ready") return;
    this.answer = answer;
    this.onAnswer();
  }
}

export async function answerOf(url, signal) {
  try {
    const response = await fetch(url, { cache: "no-store", signal });
    const data = await response.json().catch(() => undefined);
    if (response.ok && data?.api === "podgpu/v1") return { state: "ready", data };
    // A server without this path has a message that helps nobody.
    const hasMessage = typeof data?.error === "string" && data.reason !== "no_path";
    const message = hasMessage ? data.error : "";
    if (response.status === 404) return { state: "missing", message };
    return { state: "failed", message: message || `The server responds with ${response.status}` };
  } catch {
    return { state: "failed", message: "No answer from the server" };
  }
}

/**
 * Explains why nothing is shown. `missing`: text for a path that the server does not have. `none`:
 * text for an answer that has nothing to show.
 *
 * @param {Answer} answer
 */
export function noneText({ state, message }, missing, none = "") {
  if (state === "ready") return none;
  if (state === "waiting") return "Loading";
  if (state === "missing") return message ? plain(message) : missing;
  return `${plain(message)}. Trying again.`;
}
