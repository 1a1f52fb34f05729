// Shows what a pod used from its start to its end, whether it used its GPUs well, and which smaller
// share would be sufficient.

import { Question } from "./ask.js";
import { classes, fact, h, place, plain, setClass, setText, showText } from "./dom.js";
import {
  amount,
  count,
  duration,
  listed,
  memory,
  money,
  moment,
  percent,
  watts,
} from "./format.js";
import { lowered, slowLink } from "./job.js";
import { tokenFacts } from "./tokens.js";
import { wasteOf } from "./totals.js";

const EVERY_SECONDS = 30;
// The server's verdicts with their words and colours.
const VERDICTS = {
  slowed_down: ["Slowed down", "warning"],
  little_computed: ["Little computed", "old"],
  well_used: ["Well used", "good"],
  partly_used: ["Partly used", "old"],
  hardly_used: ["Hardly used", "warning"],
};
// What slowed a pod down. The server ranks these causes, and says which of them matter.
const LASTING = {
  waiting: "waited for other containers",
  throttling: "throttled",
  failing: "with a lost or failing GPU",
};
// Known only for the current moment.
const CURRENT = {
  low_activity: (ratio) => `tensor cores active only ${percent(ratio)} now`,
  pcie: (rate) => `${traffic(rate)} over PCIe now`,
  nvlink: (rate) => `${traffic(rate)} over NVLink now`,
};
const SCALE = [
  "From 60 % busy (on a shared GPU: of its share) it counts as well used,",
  "below 20 % as hardly used.",
  "Busy means that something ran, not how much.",
].join(" ");
const WHY_LOW = [
  "It may wait for data, or start many small kernels.",
  "A job without matrix multiplications looks the same.",
].join(" ");
const SIGNS = {
  found: ["\u25b2", "yes"],
  none: ["\u2713", "no"],
  not_measured: ["?", "not measured"],
  not_applicable: ["\u2013", "does not apply"],
};
const SHARED = "Tensor activity is not known on a shared GPU.";

export class Summary {
  constructor(onAnswer) {
    this.question = new Question(onAnswer);
    this.title = h("span");
    this.verdict = h("p");
    this.why = h("p", { class: "about" });
    this.slow = h("p", { class: "verdict verdict-warning" });
    this.facts = h("dl", { class: "facts" });
    this.hint = h("p", { class: "hint-box" });
    this.answer = h("p", { class: "slow-answer" });
    this.checks = h("ul", { class: "slow-checks" });
    this.checked = h(
      "section",
      { class: "slow" },
      h("h2", {}, "Why is it slow?"),
      this.answer,
      this.checks,
    );
    // The page of the pod begins with it.
    this.head = h("div", { class: "judged" });
    this.head.append(this.slow, this.verdict, this.why, this.hint, this.checked);
    this.element = h("section", { class: "summary" }, h("h2", {}, this.title), this.facts);
  }

  forget() {
    this.question.forget();
  }

  // `whole`: what a use of 100 % refers to, such as GPU.
  show(path, whole) {
    const { state, data } = this.question.want(`api/v1/summary/${path}`, EVERY_SECONDS);
    const isReady = state === "ready";
    this.element.hidden = !isReady;
    this.head.hidden = !isReady;
    this.isWaiting = state === "waiting";
    // Start, and end unless it still runs.
    this.life = isReady ? [data.from, data.to] : undefined;
    if (!isReady) return;

    setText(this.title, lifeText(data));
    place(this.facts, factsOf(data, whole));
    const { text, colour, why } = judge(data);
    this.verdict.className = `verdict verdict-${colour}`;
    showText(this.verdict, text);
    showText(this.why, why);
    this.slow.hidden = !data.slowest;
    if (data.slowest) place(this.slow, [slowElement(data.slowest)]);
    this.showChecks(data);
    showText(this.hint, plain(data.hint ?? ""));
  }

  // The server says what slowed the pod down, what did not, and what could not be measured.
  showChecks({ checks = [], why_slow: answer = "" }) {
    this.checked.hidden = !checks.length;
    const written = JSON.stringify(checks);
    if (written === this.written) return;
    this.written = written;
    const states = checks.map((check) => check.state);
    const isComplete = !states.includes("not_measured");
    // If a cause is found, the first lines of the list say it.
    this.answer.hidden = states.includes("found");
    setText(this.answer, plain(answer));
    setClass(this.answer, classes("slow-answer", isComplete && "is-good"));
    place(this.checks, checks.map(checkElement));
  }
}

function lifeText({ from, to }) {
  if (to === undefined) return `Since ${moment(from)}`;
  return `From ${moment(from)} to ${moment(to)}`;
}

function checkElement({ state, title, says, do: advice }) {
  const [sign, word] = SIGNS[state] ?? ["", plain(state)];
  const text = h("span", { class: "slow-says" }, `${plain(says)}.`);
  if (advice) {
    const purpose = state === "not_measured" ? "To measure it" : "To do";
    text.append(h("span", { class: "slow-do" }, ` ${purpose}: ${plain(advice)}.`));
  }
  return h(
    "li",
    { class: `slow-check is-${state}` },
    h("span", { class: "slow-sign", "aria-hidden": "true" }, sign),
    h("span", { class: "slow-name" }, plain(title), `: ${word}`),
    text,
  );
}

function slowElement(slowest) {
  const text = "Its job has a slow GPU, for which all its pods may wait. ";
  return h("span", {}, text, slowLink(slowest), `: ${plain(lowered(slowest.says))}`);
}

// Returns the sentence for the server's verdict, its colour, and the values and assumption behind
// it. Tensor, memory and power values exist only if the pod does not share its GPUs.
function judge(data) {
  const { verdict, causes = [] } = data;
  const [words, colour] = VERDICTS[verdict] ?? [];
  if (!words) return { text: "", why: "" };

  const busy = busyText(data);
  const slow = listed(causes.filter(({ cause }) => cause in LASTING).map(lastingText));
  const current = currentText(causes);
  const assumption = verdict === "little_computed" ? WHY_LOW : SCALE;
  const why = `${valuesOf(data)} ${assumption}`;
  if (verdict === "slowed_down") {
    const also = current ? `, and ${current}` : "";
    return { text: `${words}: ${slow} (${busy})${also}`, colour, why };
  }
  if (verdict === "little_computed") {
    const low = current || `power only ${percent(powerRatio(data))} of the limit`;
    const also = slow ? `; ${slow}` : "";
    return { text: `${words}: ${busy}, but ${low}${also}`, colour, why };
  }
  const text = `: ${busy}${tensorText(data)}`;
  if (!slow) return { text: `${words}${text}`, colour, why };
  // What slows it down spoils a good verdict.
  const spoiled = colour === "good" ? "old" : colour;
  return { text: `${words}, but ${slow}${text}`, colour: spoiled, why };
}

function busyText({ mean_device_use: use, mean_share_use: share, shared }) {
  const text = `busy ${percent(use)} of the time`;
  const hasShare = shared && share > 0;
  return hasShare ? `${text}, ${percent(share)} of its share` : text;
}

function tensorText({ verdict, tensor_active_ratio: tensor }) {
  if (tensor === undefined || verdict === "hardly_used") return "";
  return `, tensor cores active ${percent(tensor)} now`;
}

// Returns the sentences below the verdict, with the current activity and the mean power.
function valuesOf(data) {
  const { current_use: now, tensor_active_ratio: tensor, dram_active_ratio: dram, shared } = data;
  const power = powerRatio(data);
  const active = listed([
    tensor !== undefined && `tensor cores active ${percent(tensor)}`,
    dram !== undefined && `memory interface ${percent(dram)}`,
  ]);
  const sentences = [
    active && `Now: busy ${percent(now)}, ${active} of the time.`,
    power !== undefined && `Mean power: ${percent(power)} of the limit.`,
    shared && SHARED,
  ];
  return sentences.filter(Boolean).join(" ");
}

// A brief cause was long, but only a small share of the time.
function lastingText({ cause, seconds, ratio, brief }) {
  if (brief) return `${LASTING[cause]} for ${duration(seconds)}`;
  return `${LASTING[cause]} ${percent(ratio)} of the time`;
}

// Says why a GPU that is busy computes little now. Empty if it does not, or if it is not known.
function currentText(causes) {
  const current = causes.filter(({ cause }) => cause in CURRENT);
  return listed(current.map(({ cause, value }) => CURRENT[cause](value)));
}

function traffic(bytesPerSecond) {
  return `${amount(bytesPerSecond / 1e9)}\u00a0GB/s`;
}

function powerRatio({ mean_power_watts: power, power_limit_watts: limit }) {
  return limit > 0 && power !== undefined ? power / limit : undefined;
}

function factsOf(data, whole) {
  const facts = [
    fact("Duration", duration(data.duration_seconds)),
    fact("GPU-hours", amount(data.gpu_hours)),
  ];
  const add = (title, value, write) => {
    if (value !== undefined) facts.push(fact(title, write(value)));
  };
  const hours = (number) => `${amount(number)}\u00a0GPU-hours`;
  const ofOne = data.gpus > 1 ? " of one GPU" : "";
  const step = data.step_seconds ? `, ${duration(data.step_seconds)} mean` : "";
  const waste = wasteOf(data.waste?.cost);
  add(`Mean use of the ${whole}`, data.mean_device_use, percent);
  add(`Peak use of the ${whole}${step}`, data.peak_use, percent);
  add(`Peak memory${ofOne}`, data.peak_memory_bytes, memory);
  add(`Mean power${ofOne}`, data.mean_power_watts, watts);
  add("Idle", data.idle_hours || undefined, hours);
  add("Energy", data.energy_kwh, (energy) => `${amount(energy)}\u00a0kWh`);
  add("Cost", data.cost, (cost) => money(cost, data.currency));
  if (waste.total > 0) facts.push(fact("Wasted", waste.fullText(money, data.currency)));
  facts.push(...tokenFacts(data));
  add("Waited", data.wait_seconds || undefined, duration);
  add("Throttled", data.throttled_seconds || undefined, duration);
  facts.push(fact("Errors", data.errors ? count(data.errors) : "none"));
  return facts;
}
