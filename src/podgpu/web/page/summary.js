// Shows what a pod used from its start to its end, whether it used its GPUs well, and which smaller share would be
// sufficient.

import { Question } from "./ask.js";
import { gpuHash } from "./criteria.js";
import { fact, h, place, plain, setClass, setText } from "./dom.js";
import { amount, count, duration, memory, money, moment, percent, watts } from "./format.js";
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
const SCALE =
  "From 60 % busy (on a shared GPU: of its share) it counts as well used, below 20 % as hardly used. Busy means that something ran, not how much.";
const WHY_LOW =
  "It may wait for data, or start many small kernels. A job without matrix multiplications looks the same.";
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
    this.head = h(
      "div",
      { class: "judged" },
      this.slow,
      this.verdict,
      this.why,
      this.hint,
      this.checked,
    ); // the page of the pod begins with it
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
    setText(
      this.title,
      data.to === undefined
        ? `Since ${moment(data.from)}`
        : `From ${moment(data.from)} to ${moment(data.to)}`,
    );
    place(this.facts, factsOf(data, whole));
    const { text, colour, why } = judge(data);
    this.verdict.hidden = this.why.hidden = !text;
    this.verdict.className = `verdict verdict-${colour}`;
    setText(this.verdict, text);
    setText(this.why, why);
    this.slow.hidden = !data.slowest;
    if (data.slowest) place(this.slow, [slowElement(data.slowest)]);
    this.showChecks(data);
    this.hint.hidden = !data.hint;
    setText(this.hint, plain(data.hint ?? ""));
  }

  // The server says what slowed the pod down, what did not, and what could not be measured.
  showChecks({ checks = [], why_slow: answer = "" }) {
    this.checked.hidden = !checks.length;
    const written = JSON.stringify(checks);
    if (written === this.written) return;
    this.written = written;
    const isFound = checks.some(({ state }) => state === "found");
    this.answer.hidden = isFound; // the first lines of the list say it
    setText(this.answer, plain(answer));
    setClass(
      this.answer,
      `slow-answer${checks.some(({ state }) => state === "not_measured") ? "" : " is-good"}`,
    );
    place(this.checks, checks.map(checkElement));
  }
}

function checkElement({ state, title, says, do: advice }) {
  const [sign, word] = SIGNS[state] ?? ["", plain(state)];
  const todo = state === "not_measured" ? "To measure it: " : "To do: ";
  return h(
    "li",
    { class: `slow-check is-${state}` },
    h("span", { class: "slow-sign", "aria-hidden": "true" }, sign),
    h("span", { class: "slow-name" }, plain(title), `: ${word}`),
    h(
      "span",
      { class: "slow-says" },
      `${plain(says)}.`,
      advice ? h("span", { class: "slow-do" }, ` ${todo}${plain(advice)}.`) : undefined,
    ),
  );
}

function slowElement({ node, index, uuid, says }) {
  const name = index === undefined ? "a GPU" : `GPU ${index}`;
  const link = h("a", { href: gpuHash(uuid) }, plain(`${name} of ${node}`));
  return h(
    "span",
    {},
    "Its job has a slow GPU, for which all its pods may wait. ",
    link,
    `: ${plain(says.charAt(0).toLowerCase() + says.slice(1))}`,
  );
}

// Returns the sentence for the server's verdict, its colour, and the values and assumption behind it. Tensor, memory and
// power values exist only if the pod does not share its GPUs.
function judge(data) {
  const { verdict, mean_share_use: share, tensor_active_ratio: tensor, shared, causes = [] } = data;
  const [words, colour] = VERDICTS[verdict] ?? [];
  if (!words) return { text: "", why: "" };

  const busy = `busy ${percent(data.mean_device_use)} of the time${shared && share > 0 ? `, ${percent(share)} of its share` : ""}`;
  const values = valuesOf(data);
  const slow = causes
    .filter(({ cause }) => cause in LASTING)
    .map(lastingText)
    .join(", ");
  const current = currentText(causes);
  if (verdict === "slowed_down") {
    const also = current ? `, and ${current}` : "";
    return { text: `${words}: ${slow} (${busy})${also}`, colour, why: `${values} ${SCALE}` };
  }
  if (verdict === "little_computed") {
    const low = current || `power only ${percent(powerRatio(data))} of the limit`;
    return {
      text: `${words}: ${busy}, but ${low}${slow ? `; ${slow}` : ""}`,
      colour,
      why: `${values} ${WHY_LOW}`,
    };
  }
  const but = slow ? `, but ${slow}` : "";
  const rest =
    tensor === undefined || verdict === "hardly_used"
      ? ""
      : `, tensor cores active ${percent(tensor)} now`;
  return {
    text: `${words}${but}: ${busy}${rest}`,
    colour: slow && colour === "good" ? "old" : colour,
    why: `${values} ${SCALE}`,
  };
}

// Returns the sentence below the verdict, with the current activity and the mean power.
function valuesOf(data) {
  const { current_use: now, tensor_active_ratio: tensor, dram_active_ratio: dram, shared } = data;
  const power = powerRatio(data);
  const current = [
    tensor !== undefined && `tensor cores active ${percent(tensor)}`,
    dram !== undefined && `memory interface ${percent(dram)}`,
  ].filter(Boolean);
  return [
    current.length > 0 && `Now: busy ${percent(now)}, ${current.join(", ")} of the time.`,
    power !== undefined && `Mean power: ${percent(power)} of the limit.`,
    shared && SHARED,
  ]
    .filter(Boolean)
    .join(" ");
}

// A brief cause was long, but only a small share of the time.
function lastingText({ cause, seconds, ratio, brief }) {
  if (brief) return `${LASTING[cause]} for ${duration(seconds)}`;
  return `${LASTING[cause]} ${percent(ratio)} of the time`;
}

// Says why a GPU that is busy computes little now. Empty if it does not, or if it is not known.
function currentText(causes) {
  return causes
    .filter(({ cause }) => cause in CURRENT)
    .map(({ cause, value }) => CURRENT[cause](value))
    .join(", ");
}

function traffic(bytesPerSecond) {
  return `${amount(bytesPerSecond / 1e9)}\u00a0GB/s`;
}

function powerRatio({ mean_power_watts: power, power_limit_watts: limit }) {
  return limit > 0 && power !== undefined ? power / limit : undefined;
}

function factsOf(data, whole) {
  const known = (title, value, write) => value !== undefined && fact(title, write(value));
  const waste = wasteOf(data.waste?.cost);
  const ofOne = data.gpus > 1 ? " of one GPU" : "";
  return [
    fact("Duration", duration(data.duration_seconds)),
    fact("GPU-hours", amount(data.gpu_hours)),
    known(`Mean use of the ${whole}`, data.mean_device_use, percent),
    known(
      `Peak use of the ${whole}${data.step_seconds ? `, ${duration(data.step_seconds)} mean` : ""}`,
      data.peak_use,
      percent,
    ),
    known(`Peak memory${ofOne}`, data.peak_memory_bytes, memory),
    known(`Mean power${ofOne}`, data.mean_power_watts, watts),
    known("Idle", data.idle_hours || undefined, (hours) => `${amount(hours)}\u00a0GPU-hours`),
    known("Energy", data.energy_kwh, (energy) => `${amount(energy)}\u00a0kWh`),
    known("Cost", data.cost, (cost) => money(cost, data.currency)),
    waste.total > 0 && fact("Wasted", waste.fullText(money, data.currency)),
    ...tokenFacts(data),
    known("Waited", data.wait_seconds || undefined, duration),
    known("Throttled", data.throttled_seconds || undefined, duration),
    fact("Errors", data.errors ? count(data.errors) : "none"),
  ].filter(Boolean);
}
