// Charts with a common time axis, the holders of the GPU, and its problems. The pointer and the
// arrow keys show the values at one time.

import { Chart } from "./chart.js";
import { severityOf } from "./conditions.js";
import { pastTime, podHash, RANGES, writeHash } from "./criteria.js";
import { jobText } from "./devices.js";
import { h, place, plain, setTab, setText, tabs } from "./dom.js";
import { celsius, clock, duration, listed, memory, moment, percent, watts } from "./format.js";

export const NO_HISTORY = "This server keeps no history: its podgpu is older than this page.";
const TICK_SECONDS = [
  60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 14400, 21600, 43200, 86400, 172800, 432000,
  864000,
];
const MOST_TICKS = 7;
const FEWEST_STEPS = 20;
const MOSTLY_EMPTY = 0.5;
const MOST_HOLDERS = 12;
const TINTS = 4;
const LONG_SECONDS = 2 * 86_400; // the ticks of a longer axis have dates
const RIGHT = 0.85; // after this part of the axis, the time is left of the cursor
const LATE = 0.6; // the name of a holder that begins after this part of the axis is on its left
const NARROWEST_BAR = 0.002; // of the axis
const LABEL = "History. Use the arrow keys to show the values at one time.";
const MEMORY = "memory_used_bytes";
// `most(values)` returns the value of the top edge.
const KINDS = [
  { name: "utilization_ratio", title: "Utilisation", write: percent, most: () => 1 },
  {
    name: MEMORY,
    title: "Memory used",
    write: memory,
    most: (values) => rounded(largest(values), 1024 ** 3),
  },
  {
    name: "power_watts",
    title: "Power",
    write: watts,
    most: (values) => rounded(largest(values), 1),
  },
  {
    name: "temperature_celsius",
    title: "Temperature",
    write: celsius,
    most: (values) => Math.max(100, largest(values)),
  },
];
const KEYS = ["ArrowLeft", "ArrowRight", "PageUp", "PageDown", "Home", "End"];

export class Timeline {
  // `hashOf(criteria)` returns the address for a range. `ranges`: the ranges that the user can
  // choose.
  constructor(hashOf, ranges = RANGES) {
    this.hashOf = hashOf;
    this.ranges = ranges;
    this.cluster = undefined; // used in the links to pods
    this.ways = ranges.map((range) => h("a", {}, range));
    this.about = h("p", { class: "about", role: "status" });
    this.charts = KINDS.map(({ title, write, most }) => new Chart(title, write, most));
    this.holders = h("ul", { class: "lanes" });
    const holderTitle = h("h3", {}, "Held by");
    this.holderSection = h("section", { class: "lane-section" }, holderTitle, this.holders);
    this.axis = h("div", { class: "axis", "aria-hidden": "true" });
    this.time = h("span", { class: "cursor-time" });
    this.cursor = h("div", { class: "cursor", hidden: true }, this.time);
    this.area = h("div", { class: "cursor-area", "aria-hidden": "true" }, this.cursor);
    this.plot = h("div", { class: "plot", tabindex: "0", role: "group", "aria-label": LABEL });
    this.plot.append(...this.charts.map((chart) => chart.element));
    this.plot.append(this.holderSection, this.axis, this.area);
    this.spoken = h("p", { class: "announced", "aria-live": "polite" });
    const head = h("div", { class: "timeline-head" }, h("h2", {}, "History"));
    head.append(tabs("Range", this.ways), this.about);
    this.element = h("section", { class: "timeline" }, head, this.plot, this.spoken);
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerleave", () => this.read(undefined));
    this.plot.addEventListener("keydown", (event) => this.step(event));
    this.plot.addEventListener("blur", () => this.read(undefined));
  }

  showRange(range, criteria) {
    this.ranges.forEach((way, i) => {
      const href = writeHash({ ...this.hashOf(criteria), range: way });
      setTab(this.ways[i], href, way === range, "true");
    });
  }

  // Shows a message instead of charts.
  showNone(text) {
    this.plot.hidden = true;
    setText(this.about, text);
    this.answer = undefined;
  }

  // `answer`: from, to, step_seconds, marks and optionally holders. `answered`: name and series of
  // each device. `memoryTotal`: total memory, if there is only one GPU. `life`: [from, to], if only
  // that part is shown.
  show(answer, answered, memoryTotal, life) {
    const written = JSON.stringify([life, pastTime()]);
    if (answer === this.answer && written === this.written) return;
    this.answer = answer;
    this.written = written;
    const [drawn, devices] = life ? clipped(answer, answered, ...life) : trimmed(answer, answered);
    const { from, to, step_seconds: step, holders = [] } = drawn;
    this.axisOf = { from, to, step };
    const isValid = to > from && step > 0;
    if (!isValid) {
      this.showNone("No history yet.");
      return;
    }
    this.showCharts(drawn, devices, memoryTotal);
    const isEmpty = this.charts.every((chart) => chart.element.hidden) && !holders.length;
    this.plot.hidden = isEmpty;
    const isTrimmed = !life && drawn !== answer;
    const since = isTrimmed ? `, since ${moment(from)}: nothing older is recorded` : "";
    const about = `One value every ${duration(step)}${since}`;
    setText(this.about, isEmpty ? "No history yet." : about);
    this.showHolders(holders);
    this.showAxis(ticksOf(drawn));
    this.read(undefined);
  }

  showCharts(drawn, devices, memoryTotal) {
    const { from, to } = drawn;
    const marks = (drawn.marks ?? []).map((mark) => markOf(mark, drawn));
    const past = Number(pastTime()); // 0 for now
    if (past > from && past < to) marks.push({ at: past, severity: "past" });
    const ticks = ticksOf(drawn);
    KINDS.forEach(({ name }, i) => {
      const lines = linesOf(devices, name);
      const top = name === MEMORY ? memoryTotal : undefined;
      this.charts[i].show(this.axisOf, lines, marks, ticks, top);
    });
  }

  // Returns the position of a time on the axis, from 0 to 1.
  ratio(at) {
    const { from, to } = this.axisOf;
    return Math.min(1, Math.max(0, (at - from) / (to - from)));
  }

  showHolders(holders) {
    const lanes = lanesOf(holders).slice(0, MOST_HOLDERS);
    this.holderSection.hidden = !lanes.length;
    const elements = lanes.map((lane) => this.lane(lane));
    place(this.holders, elements);
  }

  lane({ namespace, pod, name, times, tint }) {
    const href = pod ? podHash(namespace, pod, this.cluster) : undefined;
    const label = h("a", { href, class: "lane-name" }, h("bdi", {}, plain(name)));
    this.placeLabel(label, times);
    const bars = times.map(([from, to]) => this.laneBar(from, to, tint));
    return h("li", { class: "lane" }, label, h("span", { class: "lane-track" }, ...bars));
  }

  // Places the name above its first bar. A name at the right edge ends where its last bar ends.
  placeLabel(label, times) {
    const [begin] = times[0];
    const [, end = this.axisOf.to] = times.at(-1);
    const start = this.ratio(begin);
    const isLate = start >= LATE;
    if (isLate) label.style.marginRight = `${100 * (1 - this.ratio(end))}%`;
    else label.style.marginLeft = `${100 * start}%`;
    label.classList.toggle("is-late", isLate);
  }

  // `to`: undefined if it still runs.
  laneBar(from, to, tint) {
    const until = to === undefined ? "now" : moment(to);
    const title = `${moment(from)} to ${until}`;
    const bar = h("span", { class: `lane-bar tint-${tint}`, title });
    const start = this.ratio(from);
    const length = this.ratio(to ?? this.axisOf.to) - start;
    bar.style.left = `${100 * start}%`;
    bar.style.width = `${100 * Math.max(NARROWEST_BAR, length)}%`;
    return bar;
  }

  showAxis(ticks) {
    const isLong = this.axisOf.to - this.axisOf.from > LONG_SECONDS;
    const write = isLong ? moment : clock;
    const elements = ticks.map((at) => {
      const tick = h("span", {}, write(at));
      tick.style.left = `${100 * this.ratio(at)}%`;
      return tick;
    });
    place(this.axis, elements);
  }

  point(event) {
    const { left, width } = this.area.getBoundingClientRect();
    const { from, to, step } = this.axisOf;
    const length = to - from;
    const seconds = ((event.clientX - left) / width) * length;
    const isOutside = seconds < 0 || seconds > length;
    this.read(isOutside ? undefined : Math.round(seconds / step));
  }

  step(event) {
    if (event.target !== this.plot || !KEYS.includes(event.key)) return;
    event.preventDefault();
    const { from, to, step } = this.axisOf;
    const last = Math.floor((to - from) / step);
    const next = movedStep(event.key, this.at ?? last, last);
    this.read(next, true);
  }

  // Shows the values at `step` above every chart. `step` is undefined if the pointer is elsewhere.
  read(step, isSpoken = false) {
    this.at = step;
    this.cursor.hidden = step === undefined;
    const texts = this.charts.map((chart) => chart.read(step));
    if (step === undefined) return;

    const { from, to, step: seconds } = this.axisOf;
    const at = Math.min(to, from + step * seconds);
    const time = seconds < 60 ? clock(at, true) : moment(at);
    const position = this.ratio(at);
    this.cursor.style.left = `${100 * position}%`;
    this.cursor.classList.toggle("is-right", position > RIGHT);
    setText(this.time, time);
    if (!isSpoken) return;
    const spoken = texts.map((text, i) => text && `${KINDS[i].title} ${text}`);
    setText(this.spoken, listed([time, ...spoken]));
  }
}

// Returns the step to which a key leads. PageUp and PageDown skip ten steps.
export function movedStep(key, step, last) {
  const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 };
  if (key === "Home") return 0;
  if (key === "End") return last;
  return Math.min(last, Math.max(0, step + moves[key]));
}

// Returns the lines of one chart: the devices that have a value.
function linesOf(devices, name) {
  const lines = devices.map((device) => ({
    name: device.name,
    values: device.series?.[name] ?? [],
    isMarked: device.isMarked,
  }));
  return lines.filter(({ values }) => values.some(Number.isFinite));
}

// Returns the part of the range that has data, because a server that has just started has little.
function trimmed(answer, devices) {
  const all = devices.flatMap(({ series }) => Object.values(series ?? {}).filter(Array.isArray));
  const steps = largest(all.map((values) => values.length));
  const firstKnown = all.map((values) => values.findIndex(Number.isFinite));
  const first = Math.min(steps, ...firstKnown.filter((step) => step >= 0));
  const skipped = Math.min(first, steps - FEWEST_STEPS);
  const isEmpty = first === steps;
  if (isEmpty || skipped < MOSTLY_EMPTY * steps) return [answer, devices];
  const from = answer.from + skipped * answer.step_seconds;
  return [{ ...answer, from }, sliced(devices, skipped)];
}

// Returns the devices with the steps from `first` up to, but not including, `end` of their series.
function sliced(devices, first, end) {
  return devices.map((device) => {
    const series = Object.entries(device.series ?? {});
    const slices = series.map(([name, values]) => [name, values.slice?.(first, end)]);
    return { ...device, series: Object.fromEntries(slices) };
  });
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
    if (!lanes.has(name)) {
      const tint = (lanes.size % TINTS) + 1;
      lanes.set(name, { namespace, pod, name, times: [], tint });
    }
    lanes.get(name).times.push([from, to]);
  }
  return [...lanes.values()];
}

// Returns the part of a pod's history from its start to its end, and at least two steps.
function clipped(answer, devices, from, to) {
  const { step_seconds: step } = answer;
  const first = Math.max(0, Math.floor((from - answer.from) / step));
  const end = Math.max(first + 2, Math.ceil((to - answer.from) / step) + 1);
  const bounds = {
    from: answer.from + first * step,
    to: Math.min(answer.to, answer.from + end * step),
  };
  return [{ ...answer, ...bounds }, sliced(devices, first, end)];
}

// Returns ticks at whole minutes and hours of local time.
function ticksOf({ from, to }) {
  const isWide = (seconds) => (to - from) / seconds <= MOST_TICKS;
  const step = TICK_SECONDS.find(isWide) ?? TICK_SECONDS.at(-1);
  const shift = new Date(from * 1000).getTimezoneOffset() * 60;
  const first = Math.ceil((from - shift) / step) * step + shift;
  const ticks = [];
  for (let at = first; at <= to; at += step) ticks.push(at);
  return ticks;
}
