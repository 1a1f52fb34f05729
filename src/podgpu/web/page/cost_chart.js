// Cost over time: a stacked bar for each day or hour, the period before as a line, and the forecast
// of the month.

import { Question } from "./ask.js";
import { classes, h, place, plain, setText, svg } from "./dom.js";
import { amount, clock, dotted, listed, money, percent, plural, totalMoney } from "./format.js";
import { pointsText, runsOf } from "./shapes.js";
import { movedStep } from "./timeline.js";
import { sumOf } from "./totals.js";

const EVERY_SECONDS = 300; // days change slowly
const SMALL_SECONDS = 600;
const FEWEST_DAYS = 3;
const WIDTH = 1000;
const HEIGHT = 100;
const LEAST_EMPTY = 0.2; // of the chart; a shorter part without records has no room for a text
const GAP = 0.12; // between bars, as a part of a step
const HOUR_SECONDS = 3600;
const DAY_SECONDS = 86_400;
const MOST_HOURS = 72; // longer ranges are shown by day
const MOST_TICKS = 7;
const SMALL_CHANGE = 0.005;
const PARTIAL = " (not complete)";
const KEYS = ["ArrowLeft", "ArrowRight", "Home", "End"];
const LABEL = "Cost over time. Use the arrow keys to read one step.";
const BOX = {
  viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
  preserveAspectRatio: "none",
  "aria-hidden": "true",
};
const DAY_TEXT = new Intl.DateTimeFormat("en", { month: "short", day: "numeric", timeZone: "UTC" });

export class CostChart {
  constructor(onAnswer) {
    this.question = new Question(onAnswer);
    this.title = h("h2", {}, "Cost over time");
    this.about = h("p", { class: "about" });
    this.value = h("p", { class: "chart-value", "aria-live": "polite" });
    this.legend = h("ul", { class: "chart-legend" });
    this.top = h("span");
    this.svg = svg("svg", BOX);
    this.axis = h("div", { class: "axis", "aria-hidden": "true" });
    this.empty = h("span", { class: "cost-empty", "aria-hidden": "true" });
    const scale = h("div", { class: "chart-scale", "aria-hidden": "true" });
    scale.append(this.top, h("span", {}, "0"));
    const bars = h("div", { class: "cost-bars" }, this.svg, this.empty);
    const body = h("div", { class: "chart-body" }, scale, bars);
    this.plot = h("div", {
      class: "plot chart",
      tabindex: "0",
      role: "group",
      "aria-label": LABEL,
    });
    this.plot.append(this.value, body, this.axis);
    this.budgets = h("ul", { class: "budgets", "aria-label": "Budgets of this month" });
    const head = h("div", { class: "timeline-head" }, this.title, this.about);
    this.element = h("section", { class: "costs" });
    this.element.append(head, this.plot, this.legend, this.budgets);
    this.element.hidden = true;
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.read(undefined));
    this.plot.addEventListener("keydown", (event) => this.step(event));
    this.plot.addEventListener("blur", () => this.read(undefined));
  }

  forget() {
    this.question.forget();
  }

  // `bounds`: range, or from and to. `pick(rows)` returns the rows that match the filter.
  // `nameOf(row)`: its name.
  show(bounds, by, pick, nameOf) {
    const hours = hoursOf(bounds);
    const step = hours <= MOST_HOURS ? "hour" : "day";
    const query = `${new URLSearchParams(bounds)}&by=${encodeURIComponent(by)}&step=${step}`;
    const { state, data } = this.question.want(`api/v1/costs?${query}`, EVERY_SECONDS);
    const isReady = state === "ready" && hours > 1;
    const rows = isReady ? pick(data.rows ?? []) : [];
    this.element.hidden = !rows.length;
    if (!rows.length) return;

    const written = JSON.stringify([data.to, data.by, rows.map(nameOf)]);
    if (data === this.data && written === this.written) return;
    this.data = data;
    this.written = written;
    this.bars = new Bars(data, rows, nameOf);
    this.draw();
  }

  draw() {
    const { bars, data } = this;
    setText(this.title, `${bars.title} over time`);
    setText(this.about, aboutText(data, bars));
    setText(this.top, bars.write(bars.most));
    place(this.svg, shapesOf(bars));
    this.showEmpty();
    this.showAxis();
    place(this.legend, legendOf(bars));
    const budgets = bars.budgets.map((budget) => budgetItem(budget, bars));
    place(this.budgets, budgets);
    this.budgets.hidden = !budgets.length;
    this.read(undefined);
  }

  // Says in the empty part of a young history that there are no records.
  showEmpty() {
    const { bars } = this;
    const first = firstKnown(bars.sums);
    const isShown = first >= LEAST_EMPTY * bars.steps;
    this.empty.hidden = !isShown;
    this.empty.style.width = `${(100 * first) / bars.steps}%`;
    setText(this.empty, `no record before ${bars.timeText(first)}`);
  }

  showAxis() {
    const { steps } = this.bars;
    const every = Math.ceil(steps / MOST_TICKS);
    const ticks = [];
    for (let i = 0; i < steps; i += every) {
      const tick = h("span", {}, this.bars.timeText(i));
      tick.style.left = `${(100 * (i + 0.5)) / steps}%`;
      ticks.push(tick);
    }
    place(this.axis, ticks);
  }

  point(event) {
    const { left, width } = this.svg.getBoundingClientRect();
    const ratio = (event.clientX - left) / width;
    this.read(Math.floor(ratio * this.bars.steps));
  }

  step(event) {
    if (!KEYS.includes(event.key)) return;
    event.preventDefault();
    const last = this.bars.steps - 1;
    this.read(movedStep(event.key, this.at ?? last, last));
  }

  // Shows the values of one step. `step` is undefined if the pointer is elsewhere.
  read(step) {
    const { bars } = this;
    const isPointed = step !== undefined;
    this.at = isPointed ? Math.min(bars.steps - 1, Math.max(0, step)) : undefined;
    setText(this.value, isPointed ? bars.textAt(this.at) : "Point at a bar to read it");
    this.svg.querySelectorAll(".cost-step").forEach((group, i) => {
      group.classList.toggle("is-read", i === this.at);
    });
  }
}

// A small chart of cost and use for the first screen. It leads to the Cost view.
export class SmallCosts {
  constructor(element, onAnswer) {
    this.element = element;
    this.question = new Question(onAnswer);
    this.range = "14d";
    this.text = h("span");
    this.svg = svg("svg", BOX);
    this.meaning = h("span", { class: "small-meaning" });
    place(element, [this.text, this.svg, this.meaning]);
  }

  // `isShown`: false in other views, and for a past time.
  show(isShown) {
    if (isShown && !this.isMissing) this.ask();
    this.element.hidden = !isShown || !this.isDrawn;
  }

  ask() {
    const step = this.range === "24h" ? "hour" : "day";
    const url = `api/v1/costs?range=${this.range}&by=namespace&step=${step}`;
    const { state, data } = this.question.want(url, SMALL_SECONDS);
    this.isMissing = state === "missing"; // an older podgpu
    if (state !== "ready" || data === this.data) return;
    this.data = data;
    const known = (data.totals?.steps?.gpu_hours ?? []).filter(Number.isFinite).length;
    const isYoung = step === "day" && known < FEWEST_DAYS;
    if (isYoung) {
      this.range = "24h"; // a new history has only hours
      this.ask();
      return;
    }
    this.isDrawn = known > 0;
    if (this.isDrawn) this.draw(data);
  }

  draw(data) {
    const all = new Bars(data, data.rows ?? [], (row) => row.namespace ?? "");
    // A young history begins with its first record.
    const first = firstKnown(all.sums);
    const sums = all.sums.slice(first);
    const steps = sums.length;
    const { cost, gpu_hours: hours, mean_use: use } = data.totals;
    const total = all.write(all.isCost ? cost : hours);
    const length = plural(steps, all.unit);
    const figure = all.isCost ? "cost" : "GPU-hours";
    setText(this.meaning, `bars: ${figure}, line: use`);
    const useText = use !== undefined && `${percent(use)} used of what is held`;
    setText(this.text, dotted([`${all.title}, last ${length}: ${total}`, useText]));

    const shapes = shapesOf({
      steps,
      sums,
      most: all.most,
      complete: all.complete.slice(first),
      lines: [{ values: sums, tint: "others" }],
      previous: [],
      limit: undefined,
    });
    const uses = (data.totals.steps?.mean_use ?? []).slice(first);
    place(this.svg, [...shapes, useLine(uses)]);
  }
}

// The step of the first record.
function firstKnown(sums) {
  return Math.max(0, sums.findIndex(Number.isFinite));
}

// The use, from 0 to 100 %. It is interrupted where it is unknown.
function useLine(values) {
  const width = WIDTH / values.length;
  const x = (i) => (i + 0.5) * width;
  const y = (value) => HEIGHT - HEIGHT * Math.min(1, value);
  const shapes = runsOf(values, x, y).map((run) => {
    const [first] = run;
    // The short line makes a single value visible.
    return `M${pointsText([first], 2)}h1L${pointsText(run, 2)}`;
  });
  return svg("path", { class: "line", d: shapes.join("") });
}

function hoursOf({ range, from, to }) {
  if (range === "month") return 31 * 24;
  if (range) return Number.parseInt(range, 10) * (range.endsWith("d") ? 24 : 1);
  return ((Number(to) || Date.now() / 1000) - Number(from)) / HOUR_SECONDS;
}

// What is drawn: for each step, the parts of the stack, or undefined without a record.
class Bars {
  constructor(data, rows, nameOf) {
    this.data = data;
    this.isCost = rows.some((row) => row.steps?.cost?.some(Number.isFinite));
    this.isDay = data.step_seconds === DAY_SECONDS;
    this.isAll = rows.length === data.rows.length;
    this.title = this.isCost ? "Cost" : "GPU-hours";
    this.unit = this.isDay ? "day" : "hour";

    const name = this.isCost ? "cost" : "gpu_hours";
    const totals = data.totals?.steps?.[name] ?? [];
    const previous = data.previous?.totals?.steps?.[name] ?? [];
    this.steps = totals.length;
    this.complete = data.complete ?? [];
    this.lines = rows.map((row, i) => ({
      name: row.others ? "others" : nameOf(row),
      tint: tintOf(row, i),
      values: row.steps?.[name] ?? [],
      forecast: forecastText(row, data.currency),
    }));
    this.sums = totals.map((total, i) => {
      return Number.isFinite(total) ? sumAt(this.lines, i) : undefined;
    });
    // A part of the rows cannot be compared with all of the period before.
    this.previous = this.isAll ? previous : [];
    this.budgets = this.isCost ? budgetsOf(data, rows) : [];
    this.limit = this.isDay ? limitPerDay(this.budgets, rows, data.to) : undefined;
    const heights = [...this.sums, ...this.previous, this.limit].filter(Number.isFinite);
    this.most = Math.max(...heights, 0) || 1;
  }

  write(value) {
    return this.isCost ? totalMoney(value, this.data.currency) : `${amount(value)} h`;
  }

  exact(value) {
    return this.isCost ? money(value, this.data.currency) : this.write(value);
  }

  timeText(step) {
    const at = this.data.from + step * this.data.step_seconds;
    return this.isDay ? DAY_TEXT.format(new Date(at * 1000)) : clock(at);
  }

  textAt(step) {
    const sum = this.sums[step];
    const isPartial = sum !== undefined && !this.complete[step];
    const total = sum === undefined ? "no record" : this.exact(sum);
    const end = isPartial ? PARTIAL : "";
    const parts = this.lines.filter(({ values }) => values[step] > 0);
    const before = this.previous[step];
    return dotted([
      `${this.timeText(step)}: ${total}${end}`,
      ...parts.map(({ name, values }) => `${name} ${this.exact(values[step])}`),
      Number.isFinite(before) && `period before ${this.exact(before)}`,
    ]);
  }
}

function budgetsOf(data, rows) {
  const isShown = (budget) => rows.some((row) => isOf(budget, row));
  return (data.budgets ?? []).filter(isShown);
}

// Returns the sum of the budgets per day. Only if every row has a budget: otherwise, the stack and
// the line are not comparable.
function limitPerDay(budgets, rows, now) {
  const hasBudget = (row) => budgets.some((budget) => isOf(budget, row));
  const areAllCovered = rows.every((row) => row.unallocated || hasBudget(row));
  if (!budgets.length || !areAllCovered) return undefined;
  return sumOf(budgets.map((budget) => budget.per_month)) / daysOfMonth(now);
}

function isOf(budget, row) {
  if (row.unallocated || row.others || row.hidden) return false;
  return budget.label ? row.label === budget.value : row.namespace === budget.namespace;
}

function daysOfMonth(unix) {
  const at = new Date(unix * 1000);
  return new Date(Date.UTC(at.getUTCFullYear(), at.getUTCMonth() + 1, 0)).getUTCDate();
}

// Says how much of a budget is used, with a bar.
function budgetItem(budget, bars) {
  const { label, value, namespace, cost, per_month: limit, ratio, forecast } = budget;
  const name = label ? `${label}=${value}` : namespace;
  const fill = h("span", { class: "budget-fill" });
  fill.style.width = `${100 * Math.min(1, ratio)}%`;
  const used = `${bars.exact(cost)} of ${bars.exact(limit)} this month (${percent(ratio)})`;
  const expected = forecast !== undefined && `forecast ${bars.exact(forecast)}`;
  const warning = budgetWarning(budget);
  return h(
    "li",
    { class: warning ? "is-over" : "" },
    h("bdi", {}, plain(name)),
    h("span", { class: "budget-track", "aria-hidden": "true" }, fill),
    h("span", {}, listed([used, expected])),
    warning && h("strong", {}, warning),
  );
}

function budgetWarning({ cost, forecast, per_month: limit }) {
  if (cost > limit) return "over budget";
  return forecast > limit ? "forecast over budget" : "";
}

function tintOf(row, i) {
  if (row.unallocated) return "free";
  return row.others || row.hidden ? "others" : String((i % 8) + 1);
}

function sumAt(lines, i) {
  return lines.reduce((sum, { values }) => sum + (values[i] ?? 0), 0);
}

function shapesOf({ lines, sums, previous, limit, most, steps, complete }) {
  const width = WIDTH / steps;
  const y = (value) => (HEIGHT - (HEIGHT - 1) * (value / most)).toFixed(2);
  const shapes = sums.map((sum, i) => {
    const left = ((i + GAP / 2) * width).toFixed(1);
    const right = ((i + 1 - GAP / 2) * width).toFixed(1);
    // Without a record, there is no bar: it would look like a cost.
    if (sum === undefined) {
      const gap = svg("path", { class: "cost-gap", d: `M${left},${HEIGHT - 2}H${right}` });
      return svg("g", { class: "cost-step" }, gap);
    }
    const bars = [];
    let low = 0;
    for (const { values, tint } of lines) {
      if (!(values[i] > 0)) continue;
      const high = low + values[i];
      const shape = `M${left},${y(low)}V${y(high)}H${right}V${y(low)}Z`;
      bars.push(svg("path", { class: `cost-${tint}`, d: shape }));
      low = high;
    }
    return svg("g", { class: classes("cost-step", !complete[i] && "is-partial") }, ...bars);
  });

  const before = previous.map((value, i) => {
    if (!Number.isFinite(value)) return "";
    const left = (i * width).toFixed(1);
    const right = ((i + 1) * width).toFixed(1);
    return `M${left},${y(value)}H${right}`;
  });
  shapes.push(svg("path", { class: "cost-before", d: before.join("") }));
  if (limit !== undefined)
    shapes.push(svg("path", { class: "cost-budget", d: `M0,${y(limit)}H${WIDTH}` }));
  return shapes;
}

// Says what the current and the next month cost. Empty without a forecast.
function forecastText({ forecast, next_month: next }, currency) {
  if (forecast === undefined) return "";
  const after = next === undefined ? "" : `, next month ${totalMoney(next, currency)}`;
  return `${totalMoney(forecast, currency)} this month${after}`;
}

// The table below shows the costs of the period. The steps of the chart may begin later.
function legendOf(bars) {
  const { lines, previous, limit, sums, unit, complete } = bars;
  const entries = lines.map(lineEntry);
  if (previous.some(Number.isFinite)) entries.push(legendEntry("before", "period before"));
  if (limit !== undefined) {
    entries.push(legendEntry("budget", `budget per day ${bars.exact(limit)}`));
  }
  const isPartial = sums.some((sum, i) => sum !== undefined && !complete[i]);
  if (isPartial) entries.push(h("li", {}, `pale: the ${unit} is not complete`));
  const missing = sums.filter((sum) => sum === undefined).length;
  if (missing) entries.push(legendEntry("gap", `no record: ${plural(missing, unit)}`));
  return entries;
}

function lineEntry({ name, tint, forecast }) {
  const meaning = tint === "free" ? "paid for, held by nobody" : "";
  const texts = [meaning, forecast].filter(Boolean).join("; ");
  const more = texts ? ` (${texts})` : "";
  return legendEntry(tint, h("bdi", {}, name), more);
}

function legendEntry(tint, ...content) {
  const swatch = h("span", { class: `swatch cost-${tint}`, "aria-hidden": "true" });
  return h("li", {}, swatch, ...content);
}

function aboutText(data, { isCost, isDay, isAll, unit }) {
  const { forecast, previous, currency } = data;
  const texts = [isDay ? "UTC days" : "hours"];
  const isComparable = isCost && isAll;
  if (isComparable && previous?.compared?.previous_cost > 0) {
    texts.push(changeText(previous.compared, unit, currency));
  }
  if (isComparable && forecast) texts.push(...forecastTexts(forecast, currency));
  return dotted(texts);
}

function changeText({ cost, previous_cost: before, steps }, unit, currency) {
  const change = cost / before - 1;
  const costs = `${totalMoney(cost, currency)}, before ${totalMoney(before, currency)}`;
  const length = plural(steps, `complete ${unit}`);
  return `${comparison(change)} in the period before (${costs}, in ${length})`;
}

function comparison(change) {
  const size = Math.abs(change);
  if (size < SMALL_CHANGE) return "the same as";
  return change > 0 ? `${percent(size)} more than` : `${percent(size)} less than`;
}

function forecastTexts(forecast, currency) {
  const price = (value) => totalMoney(value, currency);
  const { cost, cost_so_far: past, cost_per_day: perDay, next_month: next, days, to } = forecast;
  const last = DAY_TEXT.format(new Date((to - 1) * 1000));
  const mean = `${price(perDay)} a day (mean of ${plural(days, "complete day")})`;
  const sum = `${price(past)} so far this month + ${mean}`;
  const texts = [`forecast until ${last}: ${price(cost)} = ${sum}`];
  if (next !== undefined) texts.push(`next month: ${price(next)}`);
  return texts;
}
