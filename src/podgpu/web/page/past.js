// The time control: shows the GPUs as they were at a past time, with the events around it.

import { noneText, Question } from "./ask.js";
import { pastTime, writeHash } from "./criteria.js";
import { byId, h, place, setAttribute, setText, showText } from "./dom.js";
import { aroundQuery, EventRows } from "./events.js";
import { duration, localInput, localTimes, moment, UNKNOWN } from "./format.js";

const MINUTE = 60;
const HOUR = 3600;
const DAY = 86_400;
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
  // `now()` returns the time by the server's clock. `onTime` is called with the chosen time; an
  // empty text is now.
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
      const isOther = value === "other";
      const age = isOther ? HOUR : Number(value);
      if (isOther) this.input.hidden = false;
      onTime(value ? String(Math.round(now() - age)) : "");
      if (isOther) this.input.focus();
    });
    this.input.addEventListener("change", () => {
      const at = new Date(this.input.value).getTime() / 1000;
      if (Number.isFinite(at)) onTime(String(at));
    });
  }

  // `picture`: what the server has of this time; undefined while it is loading or if there is no
  // record of it.
  show(criteria, view, picture) {
    const time = pastTime();
    const at = Number(time);
    this.banner.hidden = !time;
    document.body.toggleAttribute("data-past", Boolean(time));
    this.shown.value = time;
    setText(this.shown, time ? moment(at) : "");
    this.choice.value = time;
    byId("past-events").hidden = true;
    if (!time) {
      this.question.forget();
      return;
    }
    setText(byId("past-time"), this.timeText(at, picture));
    setText(byId("past-about"), picture ? aboutText(picture, view) : "");
    this.linkTimes(at, criteria);
    if (document.activeElement !== this.input) this.input.value = localInput(at);
    if (picture && ["", "pods", "nodes"].includes(view)) this.showEvents(at);
  }

  timeText(at, picture) {
    const time = Number.isFinite(at) ? moment(at) : UNKNOWN;
    const age = this.now() - at;
    if (time === UNKNOWN) return "This is not a valid time.";
    if (age < 0) return `${time} is in the future.`;
    const start = picture ? "You are looking at " : "";
    return `${start}${time}, ${duration(age)} ago.`;
  }

  linkTimes(at, criteria) {
    setAttribute(byId("past-now"), "href", writeHash(criteria, ""));
    for (const [id, step] of Object.entries(STEPS)) {
      const other = at + step;
      const isPast = other > 0 && other < this.now();
      byId(id).hidden = !isPast;
      setAttribute(byId(id), "href", writeHash(criteria, String(other)));
    }
  }

  showEvents(at) {
    const url = `api/v1/events?range=1h${aroundQuery()}`;
    const answer = this.question.want(url, EVERY_SECONDS);
    const all = answer.data?.events ?? [];
    const distance = (event) => Math.abs(event.at - at);
    const nearest = all.toSorted((a, b) => distance(a) - distance(b)).slice(0, MOST_EVENTS);
    const more = all.length - nearest.length;
    byId("past-events").hidden = answer.state === "missing";
    const none = noneText(answer, "", "No events within 30 minutes.");
    showText(byId("past-none"), nearest.length ? "" : none);
    showText(byId("past-more"), more ? `${more} more events within 30 minutes` : "");
    setAttribute(byId("past-more"), "href", writeHash({ view: "events" }));

    const newestFirst = nearest.toSorted((a, b) => b.at - a.at);
    const time = moment(at);
    this.list.show(newestFirst, (event) =>
      event.at > at ? `Events after ${time}` : `Events until ${time}`,
    );
  }
}

function aboutText({ step_seconds: seconds }, view) {
  if (view === "cost") return "The table has its own time range.";
  return seconds ? `Values are means over ${duration(seconds)}.` : "";
}

// Returns the server's reason why there is no view of a time, with a link to the next record.
export function rejection({ failure: reason, facts }, criteria) {
  if (facts.parameter === "at") return ["Choose another time above, or go back to now."];
  const next = facts.next_record_at;
  if (!next) return [localTimes(reason)];
  const link = h("a", { href: writeHash(criteria, String(next)) }, "Go to this record");
  return [`${localTimes(reason)}. `, link];
}
