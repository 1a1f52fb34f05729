// Polls the view while the page is visible. Transfers it only if it has changed, and retries after
// failures.

import { plain } from "./dom.js";

const FLOOR_SECONDS = 2;
const MOST_SECONDS = 5; // requests are cheap if the view was not modified
const PATIENCE_SECONDS = 20;
const LATE_INTERVALS = 3;
const SLACK_SECONDS = 5;
export const CONNECTION_LOST = "Connection lost";
const CLOCK_SET_SECONDS = 3;

export class Feed {
  constructor(url, onPicture, onTurn) {
    this.url = url;
    this.onPicture = onPicture;
    this.onTurn = onTurn;
    this.picture = undefined;
    this.failure = "";
    this.facts = {}; // further fields of the server's last error
    this.lostAt = undefined;
    this.fault = ""; // message of an exception that occurred while the page was drawn
    this.etag = "";
    this.offset = undefined; // server clock minus browser clock, in seconds
    this.timer = undefined;
    this.asking = false;
  }

  start() {
    document.addEventListener("visibilitychange", () => this.turn());
    this.turn();
  }

  // Changes the URL and requests it immediately.
  aim(url) {
    if (url === this.url) return;
    this.url = url;
    this.etag = "";
    this.turn();
  }

  turn() {
    clearTimeout(this.timer);
    if (!document.hidden && !this.asking) this.ask();
  }

  async ask() {
    this.asking = true;
    this.facts = {};
    let picture;
    const { url } = this;
    try {
      picture = await this.take(await this.answer());
      this.failure = "";
      this.lostAt = undefined;
    } catch (error) {
      const isAnswered = error instanceof Refused;
      this.failure = isAnswered ? error.message : CONNECTION_LOST;
      // Without an answer, it is not known whether the request is wrong, so it is repeated.
      if (!isAnswered) this.isRejected = false;
      this.lostAt ??= Date.now() / 1000;
    }
    if (picture) this.show(picture);
    this.asking = false;
    this.onTurn();
    this.plan(url !== this.url);
  }

  // `isOther`: another URL was chosen during the last request.
  plan(isOther) {
    if (document.hidden) return;
    const isPast = this.picture?.at !== undefined;
    // The past does not change.
    const isDone = isPast || this.isRejected;
    if (isDone && !isOther) return;
    const pause = isOther ? 0 : this.pause * 1000;
    this.timer = setTimeout(() => this.turn(), pause);
  }

  get pause() {
    const interval = this.picture?.interval_seconds ?? FLOOR_SECONDS;
    return Math.min(MOST_SECONDS, Math.max(FLOOR_SECONDS, interval));
  }

  answer() {
    const headers = this.etag ? { "If-None-Match": this.etag } : {};
    return fetch(this.url, {
      headers,
      cache: "no-store",
      signal: AbortSignal.timeout(PATIENCE_SECONDS * 1000),
    });
  }

  // Returns the picture if it is new, or if the last attempt to show it failed.
  async take(response) {
    this.compareClocks(response.headers.get("Date"));
    // Then the request is wrong, so it is not repeated.
    this.isRejected = response.status === 400;
    if (response.status === 304) return this.fault ? this.picture : undefined;
    if (response.status === 401) throw new Refused("Signed out: reload the page to sign in");
    if (response.status === 429) throw new Refused("Too many requests, trying again");
    if (!response.ok) throw await this.refusal(response);
    const picture = await response.json();
    if (picture.api !== "podgpu/v1")
      throw new Refused("The response is not from podgpu, trying again");
    this.picture = picture;
    this.etag = response.headers.get("ETag") ?? "";
    return picture;
  }

  async refusal(response) {
    const { error, ...facts } = await response.json().catch(() => ({}));
    this.facts = facts;
    if (this.isRejected) return new Refused(plain(error ?? "The server rejects this request"));
    const isText = typeof error === "string";
    const reason = isText ? plain(error) : `The server responds with ${response.status}`;
    return new Refused(`${reason}, trying again`);
  }

  show(picture) {
    try {
      this.onPicture(picture);
      this.fault = "";
    } catch (error) {
      this.fail(error);
    }
  }

  fail(error) {
    console.error(error);
    this.fault = `Page error (${error.message}): not all figures are shown, reload the page`;
  }

  // Estimates the difference of the clocks, to compute ages by the server's clock. A Date header
  // has whole seconds and arrives late, so the largest difference is the most accurate. A very
  // different one means that a clock was set.
  compareClocks(date) {
    const serverTime = Date.parse(date ?? "") / 1000;
    if (Number.isNaN(serverTime)) return;
    const offset = serverTime - Date.now() / 1000;
    const isFirst = this.offset === undefined;
    const isSet = Math.abs(offset - this.offset) > CLOCK_SET_SECONDS;
    this.offset = isFirst || isSet ? offset : Math.max(offset, this.offset);
  }

  now() {
    return Date.now() / 1000 + (this.offset ?? 0);
  }

  // Time of the newest figures; undefined if there are none yet. Figures can be older than the view
  // that has them.
  get figuresAt() {
    const { taken_at: taken, nodes } = this.picture ?? {};
    if (!taken) return undefined;
    if (!this.isAllOld) return taken;
    const ages = nodes.map((node) => node.age_seconds ?? 0);
    return taken - Math.min(...ages);
  }

  get isAllOld() {
    const nodes = this.picture?.nodes ?? [];
    return nodes.length > 0 && nodes.every((node) => node.old);
  }

  get age() {
    const at = this.figuresAt;
    return at === undefined ? undefined : Math.max(0, this.now() - at);
  }

  get state() {
    if (this.isRejected) return "past";
    if (this.failure) return "lost";
    if (this.fault) return "failed";
    if (!this.picture) return "waiting";
    if (this.picture.at !== undefined) return "past";
    if (this.isAllOld || this.age === undefined) return "old";
    const late = LATE_INTERVALS * this.picture.interval_seconds + SLACK_SECONDS;
    return this.age > late ? "old" : "live";
  }
}

class Refused extends Error {}
