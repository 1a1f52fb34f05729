// Shows what a pod used from its start to its end, and which smaller share of a GPU would be sufficient.

import { Question } from "./ask.js";
import { fact, h, place, plain, setAttribute, setText } from "./dom.js";
import { amount, count, duration, memory, money, moment, percent } from "./format.js";

const EVERY_SECONDS = 30;
// Least mean use, verdict and its colour.
const VERDICTS = [
  [0.6, "Well used", "good"],
  [0.2, "Partly used", "old"],
  [0, "Hardly used", "warning"],
];

export class Summary {
  constructor(onAnswer) {
    this.question = new Question(onAnswer);
    this.title = h("span");
    this.verdict = h("p");
    this.facts = h("dl", { class: "facts" });
    this.hint = h("p", { class: "hint-box" });
    this.element = h("section", { class: "summary" }, h("h2", {}, this.title), this.verdict, this.hint, this.facts);
  }

  forget() {
    this.question.forget();
  }

  // `whole`: what a use of 100 % refers to, such as GPU.
  show(path, whole) {
    const { state, data } = this.question.want(`api/v1/summary/${path}`, EVERY_SECONDS);
    this.element.hidden = state !== "ready";
    this.isWaiting = state === "waiting";
    this.life = undefined; // start, and end unless it still runs
    if (state !== "ready") return;
    this.life = [data.from, data.to];
    setText(this.title, data.to === undefined ? `Since ${moment(data.from)}` : `From ${moment(data.from)} to ${moment(data.to)}`);
    place(this.facts, factsOf(data, whole));
    const [, verdict, colour] = VERDICTS.find(([least]) => data.mean_use >= least) ?? [];
    this.verdict.hidden = !verdict;
    this.verdict.className = `verdict verdict-${colour}`;
    const all = data.gpus > 1 ? `its ${count(data.gpus)} ${whole.replace(/(GPU|instance)\b/g, "$1s")}` : `its ${whole}`;
    setText(this.verdict, verdict ? `${verdict}: ${percent(data.mean_use)} of ${all} on average` : "");
    setAttribute(this.verdict, "title", "From 60 % it is well used, below 20 % hardly.");
    this.hint.hidden = !data.hint;
    setText(this.hint, plain(data.hint ?? ""));
  }
}

function factsOf(data, whole) {
  const known = (title, value, write) => value !== undefined && fact(title, write(value));
  return [
    fact("Duration", duration(data.duration_seconds)),
    fact("GPU-hours", amount(data.gpu_hours)),
    known(`Mean use of the ${whole}`, data.mean_use, percent),
    known(`Peak use of the ${whole}${data.step_seconds ? `, ${duration(data.step_seconds)} mean` : ""}`, data.peak_use, percent),
    known(`Peak memory${data.gpus > 1 ? " of one GPU" : ""}`, data.peak_memory_bytes, memory),
    known("Idle", data.idle_hours || undefined, (hours) => `${amount(hours)}\u00a0GPU-hours`),
    known("Energy", data.energy_kwh, (energy) => `${amount(energy)}\u00a0kWh`),
    known("Cost", data.cost, (cost) => money(cost, data.currency)),
    known("Wasted", data.wasted || undefined, (cost) => money(cost, data.currency)),
    known("Waited", data.wait_seconds || undefined, duration),
    known("Throttled", data.throttled_seconds || undefined, duration),
    fact("Errors", data.errors ? count(data.errors) : "none"),
  ].filter(Boolean);
}
