// The time control: shows the GPUs as they were at a past time, with the events around it.

import { noneText, Question } from "./ask.js";
import { pastTime, writeHash } from "./criteria.js";
import { byId, h, place, setAttribute, setText } from "./dom.js";
import { aroundQuery, EventRows } from "./events.js";
import { duration, localTimes, moment, UNKNOWN } from "./format.js";
import { showText } from "./rows.js";

const [MINUTE, HOUR, DAY] = [60, 3600, 86_400];
/** @type {[number, string][]} */
const AGES = [
  [5 * MINUTE, "5 minutes ago"],
  [15 * MINUTE, "15 minutes ago"],
  [30 * MINUTE, "30 minutes ago"],
  [HOUR, "1 hour ago"],
  [2 * HOUR, "2 hours ago"],
  [3 * HOUR, "3 hours ago"],
  [6 * HOUR, "6 hours ago"],
  [12 * HOUR, "12 hours ago"],
  [DAY, "24 hours ago"],
  [2 * DAY, "2 days ago"],
  [3 * DAY, "3 days ago"],
  [7 * DAY, "7 days ago"],
];
const STEPS = {
  "past-hour-earlier": -HOUR,
  "past-earlier": -5 * MINUTE,
  "past-later": 5 * MINUTE,
  "past-hour-later": HOUR,
};
const MOST_EVENTS = 8;
const EVERY_SECONDS = 60;

export class Past {
  // `now()` returns the time by the server's clock. `onTime` is called with the chosen time; an empty text is now.
  constructor(now, onTime, onAnswer) {
    this.now = now;
    this.question = new Question(onAnswer);
    this.choice = byId("time");
    this.banner = byId("past");
    this.input = byId("past-input");
    this.list = new EventRows(false);
    byId("past-events").prepend(this.list.element);
    this.other = h("option", { value: "other" }, "Other time\u2026");
    this.shown = h("option", { hidden: true });
    place(this.choice, [
      h("option", { value: "" }, "Now"),
      this.shown,
      ...AGES.map(([age, text]) => h("option", { value: age }, text)),
      this.other,
    ]);
    this.choice.addEventListener("change", () => {
      const { value } = this.choice;
      if (value === "other") this.input.hidden = false;
      onTime(value ? String(Math.round(now() - (Number(value) || HOUR))) : "");
      if (value === "other") this.input.focus();
    });
    this.input.addEventListener("change", () => {
      const at = new Date(this.input.value).getTime() / 1000;
      if (Number.isFinite(at)) onTime(String(at));
    });
  }

  // `picture`: what the server has of this time; undefined while it is loading or if there is no record of it.
  show(criteria, view, picture) {
    const time = pastTime();
    const at = Number(time);
    this.banner.hidden = !time;
    document.body.toggleAttribute("data-past", Boolean(time));
    this.shown.value = time;
    setText(this.shown, time ? moment(at) : "");
    this.choice.value = time;
    byId("past-events").hidden = true;
    if (!time) return this.question.forget();
    const when = Number.isFinite(at) ? moment(at) : "";
    const age = this.now() - at;
    const valid =
      age < 0
        ? `${when} is in the future.`
        : `${picture ? "You are looking at " : ""}${when}, ${duration(age)} ago.`;
    setText(byId("past-time"), when && when !== UNKNOWN ? valid : "This is not a valid time.");
    const mean = picture?.step_seconds
      ? `Values are means over ${duration(picture.step_seconds)}.`
      : "";
    setText(
      byId("past-about"),
      view === "cost" && picture ? "The table has its own time range." : mean,
    );
    setAttribute(byId("past-now"), "href", writeHash(criteria, ""));
    for (const [id, step] of Object.entries(STEPS)) {
      const next = at + step;
      byId(id).hidden = !(next > 0 && next < this.now());
      setAttribute(byId(id), "href", writeHash(criteria, String(next)));
    }
    if (document.activeElement !== this.input) this.input.value = localInput(at);
    if (picture && ["", "pods", "nodes"].includes(view)) this.showEvents(at);
  }

  showEvents(at) {
    const { state, data, message } = this.question.want(
      `api/v1/events?range=1h${aroundQuery()}`,
      EVERY_SECONDS,
    );
    byId("past-events").hidden = state === "missing";
    const events = (data?.events ?? [])
      .toSorted((a, b) => Math.abs(a.at - at) - Math.abs(b.at - at))
      .slice(0, MOST_EVENTS);
    const more = (data?.events?.length ?? 0) - events.length;
    const none = state === "ready" ? "No events within 30 minutes." : noneText(state, message, "");
    showText(byId("past-none"), events.length ? "" : none);
    showText(byId("past-more"), more > 0 ? `${more} more events within 30 minutes` : "");
    setAttribute(byId("past-more"), "href", writeHash({ view: "events" }));
    this.list.show(
      events.toSorted((a, b) => b.at - a.at),
      (event) => `Events ${event.at > at ? "after" : "until"} ${moment(at)}`,
    );
  }
}

// Returns the server's reason why there is no view of a time, with a link to the next record.
export function rejection({ failure: reason, facts }, criteria) {
  if (facts.parameter === "at") return ["Choose another time above, or go back to now."];
  const next = facts.next_record_at;
  const link = next ? h("a", { href: writeHash(criteria, String(next)) }, "Go to this record") : "";
  return [`${localTimes(reason)}${next ? ". " : ""}`, link];
}

// Formats a time for an input of the type datetime-local.
function localInput(unix) {
  const at = new Date(unix * 1000);
  if (Number.isNaN(at.getTime())) return "";
  return new Date(at.getTime() - at.getTimezoneOffset() * 60_000).toISOString().slice(0, 16);
}
