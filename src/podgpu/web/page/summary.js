// Shows what a pod used from its start to its end, whether it used its GPUs well, and which smaller share would be
// sufficient.

import { Question } from "./ask.js";
import { fact, h, place, plain, setText } from "./dom.js";
import { amount, count, duration, memory, money, moment, percent, watts } from "./format.js";

const EVERY_SECONDS = 30;
// Least mean use, verdict and its colour.
const VERDICTS = [
  [0.6, "Well used", "good"],
  [0.2, "Partly used", "old"],
  [0, "Hardly used", "warning"],
];
// A GPU computes little if these are smaller fractions of its busy time. A job that is limited by memory needs few tensor
// cores.
const LOW_TENSOR = 0.1;
const LOW_DRAM = 0.4;
const LOW_POWER = 0.35; // fraction of the limit
// What slowed a pod down. The server ranks the causes by their share of the time.
const CAUSES = { waiting: "waited for other containers", throttling: "throttled", failing: "with a lost or failing GPU" };
const LEAST_CAUSE = 0.03; // share of the time
const SCALE = "From 60 % busy (on a shared GPU: of its share) it counts as well used, below 20 % as hardly used. Busy means that something ran, not how much.";
const WHY_LOW = "It may wait for data, or start many small kernels. A job without matrix multiplications looks the same.";
const SHARED = "Tensor activity is not known on a shared GPU.";

export class Summary {
  constructor(onAnswer) {
    this.question = new Question(onAnswer);
    this.title = h("span");
    this.verdict = h("p");
    this.why = h("p", { class: "about" });
    this.facts = h("dl", { class: "facts" });
    this.hint = h("p", { class: "hint-box" });
    this.head = h("div", { class: "judged" }, this.verdict, this.why, this.hint); // the page of the pod begins with it
    this.element = h("section", { class: "summary" }, h("h2", {}, this.title), this.facts);
  }

  forget() {
    this.question.forget();
  }

  // `whole`: what a use of 100 % refers to, such as GPU.
  show(path, whole) {
    const { state, data } = this.question.want(`api/v1/summary/${path}`, EVERY_SECONDS);
    this.element.hidden = this.head.hidden = state !== "ready";
    this.isWaiting = state === "waiting";
    this.life = undefined; // start, and end unless it still runs
    if (state !== "ready") return;
    this.life = [data.from, data.to];
    setText(this.title, data.to === undefined ? `Since ${moment(data.from)}` : `From ${moment(data.from)} to ${moment(data.to)}`);
    place(this.facts, factsOf(data, whole));
    const { text, colour, why } = judge(data);
    this.verdict.hidden = this.why.hidden = !text;
    this.verdict.className = `verdict verdict-${colour}`;
    setText(this.verdict, text);
    setText(this.why, why);
    this.hint.hidden = !data.hint;
    setText(this.hint, plain(data.hint ?? ""));
  }
}

// Returns the verdict, its colour, and the values and assumption behind it. Tensor, memory and power values exist only if
// the pod does not share its GPUs.
function judge(data) {
  const { mean_use: use, current_use: now, tensor_active_ratio: tensor, dram_active_ratio: dram, shared } = data;
  const share = shared ? data.used_hours / (data.allocated_hours - (data.unknown_hours ?? 0)) : 0; // as in the Cost view
  const judged = share > 0 ? share : use;
  const [, verdict, colour] = VERDICTS.find(([least]) => judged >= least) ?? [];
  if (!verdict) return { text: "", why: "" };
  const power = powerRatio(data);
  const current = [
    tensor !== undefined && `tensor cores active ${percent(tensor)}`,
    dram !== undefined && `memory interface ${percent(dram)}`,
  ].filter(Boolean);
  const values = [
    current.length > 0 && `Now: busy ${percent(now)}, ${current.join(", ")} of the time.`,
    power !== undefined && `Mean power: ${percent(power)} of the limit.`,
    shared && SHARED,
  ].filter(Boolean).join(" ");
  const busy = `busy ${percent(use)} of the time${share > 0 ? `, ${percent(share)} of its share` : ""}`;
  const [least] = VERDICTS[1];
  const causes = (data.causes ?? []).filter(({ cause, ratio }) => cause in CAUSES && ratio >= LEAST_CAUSE);
  const slow = causes.map(({ cause, ratio }) => `${CAUSES[cause]} ${percent(ratio)} of the time`);
  const isLowNow = now >= least && tensor < LOW_TENSOR * now && !(dram >= LOW_DRAM * now);
  const low = isLowNow ? `tensor cores active only ${percent(tensor)} now` : tensor === undefined && power < LOW_POWER ? `power only ${percent(power)} of the limit` : "";
  if (slow.length) return { text: `Slowed down: ${slow.join(", ")} (${busy})`, colour: "warning", why: `${values} ${SCALE}` };
  if (use >= least && low) return { text: `Little computed: ${busy}, but ${low}`, colour: "old", why: `${values} ${WHY_LOW}` };
  const rest = tensor === undefined || use < least ? "" : `, tensor cores active ${percent(tensor)} now`;
  return { text: `${verdict}: ${busy}${rest}`, colour, why: `${values} ${SCALE}` };
}

function powerRatio({ mean_power_watts: power, power_limit_watts: limit }) {
  return limit > 0 && power !== undefined ? power / limit : undefined;
}

function factsOf(data, whole) {
  const known = (title, value, write) => value !== undefined && fact(title, write(value));
  const ofOne = data.gpus > 1 ? " of one GPU" : "";
  return [
    fact("Duration", duration(data.duration_seconds)),
    fact("GPU-hours", amount(data.gpu_hours)),
    known(`Mean use of the ${whole}`, data.mean_use, percent),
    known(`Peak use of the ${whole}${data.step_seconds ? `, ${duration(data.step_seconds)} mean` : ""}`, data.peak_use, percent),
    known(`Peak memory${ofOne}`, data.peak_memory_bytes, memory),
    known(`Mean power${ofOne}`, data.mean_power_watts, watts),
    known("Idle", data.idle_hours || undefined, (hours) => `${amount(hours)}\u00a0GPU-hours`),
    known("Energy", data.energy_kwh, (energy) => `${amount(energy)}\u00a0kWh`),
    known("Cost", data.cost, (cost) => money(cost, data.currency)),
    known("Wasted: idle", data.wasted || undefined, (cost) => money(cost, data.currency)),
    known("Waited", data.wait_seconds || undefined, duration),
    known("Throttled", data.throttled_seconds || undefined, duration),
    fact("Errors", data.errors ? count(data.errors) : "none"),
  ].filter(Boolean);
}
