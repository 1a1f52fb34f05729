// Charts with a common time axis, the holders of the GPU, and its problems. The pointer and the arrow keys show the
// values at one time.

import { Chart } from "./chart.js";
import { severityOf } from "./conditions.js";
import { pastTime, podHash, RANGES, writeHash } from "./criteria.js";
import { jobText } from "./devices.js";
import { h, place, plain, setAttribute, setText } from "./dom.js";
import { celsius, clock, duration, memory, moment, percent, watts } from "./format.js";

export const NO_HISTORY = "This server keeps no history: its podgpu is older than this page.";
const TICK_SECONDS = [
  60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 14400, 21600, 43200, 86400, 172800, 432000,
];
const MOST_TICKS = 7;
const FEWEST_STEPS = 20;
const MOSTLY_EMPTY = 0.5;
const MOST_HOLDERS = 12;
const TINTS = 4;
const KINDS = {
  utilization_ratio: ["Utilisation", percent, () => 1],
  memory_used_bytes: ["Memory used", memory, (values) => rounded(largest(values), 1024 ** 3)],
  power_watts: ["Power", watts, (values) => rounded(largest(values), 1)],
  temperature_celsius: ["Temperature", celsius, (values) => Math.max(100, largest(values))],
};

export class Timeline {
  // `hashOf(criteria)` returns the address for a range. `ranges`: the ranges that the user can choose.
  constructor(hashOf, ranges = RANGES) {
    this.hashOf = hashOf;
    this.ranges = ranges;
    this.cluster = undefined; // used in the links to pods
    this.ways = ranges.map((range) => h("a", {}, range));
    this.about = h("p", { class: "about", role: "status" });
    this.charts = Object.fromEntries(
      Object.entries(KINDS).map(([name, [...kind]]) => [name, new Chart(...kind)]),
    );
    this.holders = h("ul", { class: "lanes" });
    this.holderSection = h(
      "section",
      { class: "lane-section" },
      h("h3", {}, "Held by"),
      this.holders,
    );
    this.axis = h("div", { class: "axis", "aria-hidden": "true" });
    this.time = h("span", { class: "cursor-time" });
    this.cursor = h("div", { class: "cursor", hidden: true }, this.time);
    const area = h("div", { class: "cursor-area", "aria-hidden": "true" }, this.cursor);
    const charts = Object.values(this.charts).map((chart) => chart.element);
    const keys = {
      tabindex: "0",
      role: "group",
      "aria-label": "History. Use the arrow keys to show the values at one time.",
    };
    this.plot = h(
      "div",
      { class: "plot", ...keys },
      ...charts,
      this.holderSection,
      this.axis,
      area,
    );
    this.area = area;
    this.spoken = h("p", { class: "announced", "aria-live": "polite" });
    const head = h(
      "div",
      { class: "timeline-head" },
      h("h2", {}, "History"),
      h("nav", { class: "tabs", "aria-label": "Range" }, ...this.ways),
      this.about,
    );
    this.element = h("section", { class: "timeline" }, head, this.plot, this.spoken);
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerleave", () => this.read(undefined));
    this.plot.addEventListener("keydown", (event) => this.step(event));
    this.plot.addEventListener("blur", () => this.read(undefined));
  }

  showRange(range, criteria) {
    this.ranges.forEach((way, i) => {
      setAttribute(this.ways[i], "href", writeHash({ ...this.hashOf(criteria), range: way }));
      setAttribute(this.ways[i], "aria-current", way === range ? "true" : undefined);
    });
  }

  // Shows a message instead of charts.
  showNone(text) {
    this.plot.hidden = true;
    setText(this.about, text);
    this.answer = undefined;
  }

  // `answer`: from, to, step_seconds, marks and optionally holders. `answered`: name and series of each device.
  // `memoryTotal`: total memory, if there is only one GPU. `life`: [from, to], if only that part is shown.
  show(answer, answered, memoryTotal, life) {
    const written = JSON.stringify([life, pastTime()]);
    if (answer === this.answer && written === this.life) return;
    this.answer = answer;
    this.life = written;
    const [drawn, devices] = life ? clipped(answer, answered, ...life) : trimmed(answer, answered);
    this.axisOf = { from: drawn.from, to: drawn.to, step: drawn.step_seconds };
    if (!(drawn.to > drawn.from) || !(drawn.step_seconds > 0))
      return this.showNone("No history yet.");
    const marks = (drawn.marks ?? []).map((mark) => markOf(mark, drawn));
    const past = Number(pastTime()); // 0 for now
    if (past > drawn.from && past < drawn.to) marks.push({ at: past, severity: "past" });
    const ticks = ticksOf(drawn);
    for (const [name, chart] of Object.entries(this.charts)) {
      const lines = devices.map((device) => ({
        name: device.name,
        values: device.series?.[name] ?? [],
        isMarked: device.isMarked,
      }));
      const top = name === "memory_used_bytes" ? memoryTotal : undefined;
      chart.show(
        this.axisOf,
        lines.filter(({ values }) => values.some(Number.isFinite)),
        marks,
        ticks,
        top,
      );
    }
    const isEmpty =
      Object.values(this.charts).every((chart) => chart.element.hidden) && !drawn.holders?.length;
    this.plot.hidden = isEmpty;
    const since =
      drawn === answer || life ? "" : `, since ${moment(drawn.from)}: nothing older is recorded`;
    setText(
      this.about,
      isEmpty ? "No history yet." : `One value every ${duration(drawn.step_seconds)}${since}`,
    );
    this.showHolders(drawn.holders ?? []);
    this.showAxis(ticks);
    this.read(undefined);
  }

  ratio(at) {
    const { from, to } = this.axisOf;
    return Math.min(1, Math.max(0, (at - from) / (to - from)));
  }

  showHolders(holders) {
    this.lanes = lanesOf(holders).slice(0, MOST_HOLDERS);
    this.holderSection.hidden = !this.lanes.length;
    place(
      this.holders,
      this.lanes.map((lane) => this.lane(lane)),
    );
  }

  lane({ namespace, pod, name, times, tint }) {
    const label = h(
      "a",
      { href: pod ? podHash(namespace, pod, this.cluster) : undefined, class: "lane-name" },
      h("bdi", {}, plain(name)),
    );
    const bars = times.map(([from, to]) => {
      const bar = h("span", {
        class: `lane-bar tint-${tint}`,
        title: `${moment(from)} to ${to === undefined ? "now" : moment(to)}`,
      });
      const [start, end] = [this.ratio(from), this.ratio(to ?? this.axisOf.to)];
      bar.style.left = `${100 * start}%`;
      bar.style.width = `${100 * Math.max(0.002, end - start)}%`;
      return bar;
    });
    const first = this.ratio(times[0][0]);
    if (first < 0.6) label.style.marginLeft = `${100 * first}%`;
    else label.style.marginRight = `${100 * (1 - this.ratio(times.at(-1)[1] ?? this.axisOf.to))}%`;
    label.classList.toggle("is-late", first >= 0.6);
    return h("li", { class: "lane" }, label, h("span", { class: "lane-track" }, ...bars));
  }

  showAxis(ticks) {
    const elements = ticks.map((at) => {
      const isLong = this.axisOf.to - this.axisOf.from > 2 * 86_400;
      const tick = h("span", {}, isLong ? moment(at) : clock(at));
      tick.style.left = `${100 * this.ratio(at)}%`;
      return tick;
    });
    place(this.axis, elements);
  }

  point(event) {
    const { left, width } = this.area.getBoundingClientRect();
    const { from, to, step } = this.axisOf;
    const at = ((event.clientX - left) / width) * (to - from);
    this.read(at < 0 || at > to - from ? undefined : Math.round(at / step));
  }

  step(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 };
    const last = Math.floor((this.axisOf.to - this.axisOf.from) / this.axisOf.step);
    if (
      event.target !== this.plot ||
      !(event.key in moves || event.key === "Home" || event.key === "End")
    )
      return;
    event.preventDefault();
    const next =
      event.key === "Home" ? 0 : event.key === "End" ? last : (this.at ?? last) + moves[event.key];
    this.read(Math.min(last, Math.max(0, next)), true);
  }

  // Shows the values at `step` above every chart. `step` is undefined if the pointer is elsewhere.
  read(step, isSpoken = false) {
    this.at = step;
    this.cursor.hidden = step === undefined;
    const texts = Object.entries(this.charts).map(([name, chart]) => [
      KINDS[name][0],
      chart.read(step),
    ]);
    if (step === undefined) return;
    const { from, to, step: seconds } = this.axisOf;
    const at = Math.min(to, from + step * seconds);
    const time = seconds < 60 ? clock(at, true) : moment(at);
    this.cursor.style.left = `${100 * this.ratio(at)}%`;
    this.cursor.classList.toggle("is-right", this.ratio(at) > 0.85);
    setText(this.time, time);
    if (!isSpoken) return;
    const spoken = texts.filter(([, text]) => text).map(([name, text]) => `${name} ${text}`);
    setText(this.spoken, [time, ...spoken].join(", "));
  }
}

// Returns the part of the range that has data, because a server that has just started has little.
function trimmed(answer, devices) {
  const all = devices.flatMap(({ series }) => Object.values(series ?? {}).filter(Array.isArray));
  const steps = largest(all.map((values) => values.length));
  const first = all.reduce((least, values) => {
    const known = values.findIndex(Number.isFinite);
    return known < 0 ? least : Math.min(least, known);
  }, steps);
  const skipped = Math.min(first, steps - FEWEST_STEPS);
  if (first === steps || skipped < MOSTLY_EMPTY * steps) return [answer, devices];
  const short = (series) =>
    Object.fromEntries(
      Object.entries(series ?? {}).map(([name, values]) => [name, values.slice?.(skipped)]),
    );
  const from = answer.from + skipped * answer.step_seconds;
  return [
    { ...answer, from },
    devices.map((device) => ({ ...device, series: short(device.series) })),
  ];
}

function largest(values) {
  return values.reduce((most, value) => Math.max(most, value), 0);
}

// Rounds up to 1, 1.5, 2, 2.5, 3, 4, 5, 6 or 8 times a power of ten.
function rounded(most, unit) {
  const amount = most / unit;
  if (amount <= 0) return unit;
  const power = 10 ** Math.floor(Math.log10(amount));
  const step = [1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].find((factor) => factor * power >= amount);
  return step * power * unit;
}

function markOf(mark, answer) {
  return {
    ...mark,
    severity: severityOf([{ name: mark.condition }]),
    until: mark.until ?? answer.to,
  };
}

function lanesOf(holders) {
  const lanes = new Map();
  for (const { namespace = "", pod = "", job = "", container = "", from, to } of holders) {
    const name = [namespace, pod || jobText(job), container].filter(Boolean).join("/");
    const lane = lanes.get(name) ?? {
      namespace,
      pod,
      name,
      times: [],
      tint: (lanes.size % TINTS) + 1,
    };
    lane.times.push([from, to]);
    lanes.set(name, lane);
  }
  return [...lanes.values()];
}

// Returns the part of a pod's history from its start to its end.
function clipped(answer, devices, from, to) {
  const { step_seconds: step } = answer;
  const first = Math.max(0, Math.floor((from - answer.from) / step));
  const last = Math.max(first + 2, Math.ceil((to - answer.from) / step) + 1);
  const cut = (series) =>
    Object.fromEntries(
      Object.entries(series ?? {}).map(([name, values]) => [name, values.slice?.(first, last)]),
    );
  const bounds = {
    from: answer.from + first * step,
    to: Math.min(answer.to, answer.from + last * step),
  };
  return [
    { ...answer, ...bounds },
    devices.map((device) => ({ ...device, series: cut(device.series) })),
  ];
}

// Returns ticks at whole minutes and hours of local time.
function ticksOf({ from, to }) {
  const step = TICK_SECONDS.find((seconds) => (to - from) / seconds <= MOST_TICKS) ?? 864000;
  const shift = new Date(from * 1000).getTimezoneOffset() * 60;
  const ticks = [];
  for (let at = Math.ceil((from - shift) / step) * step + shift; at <= to; at += step)
    ticks.push(at);
  return ticks;
}
