// Cost over time: a stacked bar for each day or hour, the period before as a line, and the forecast of the month.

import { Question } from "./ask.js";
import { h, place, plain, setText, svg } from "./dom.js";
import { amount, clock, money, percent, plural, totalMoney } from "./format.js";

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
const DAY_TEXT = new Intl.DateTimeFormat("en", { month: "short", day: "numeric", timeZone: "UTC" });

export class CostChart {
  constructor(onAnswer) {
    this.question = new Question(onAnswer);
    this.title = h("h2", {}, "Cost over time");
    this.about = h("p", { class: "about" });
    this.value = h("p", { class: "chart-value", "aria-live": "polite" });
    this.legend = h("ul", { class: "chart-legend" });
    this.top = h("span");
    this.svg = svg("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      preserveAspectRatio: "none",
      "aria-hidden": "true",
    });
    this.axis = h("div", { class: "axis", "aria-hidden": "true" });
    const scale = h(
      "div",
      { class: "chart-scale", "aria-hidden": "true" },
      this.top,
      h("span", {}, "0"),
    );
    this.empty = h("span", { class: "cost-empty", "aria-hidden": "true" });
    const body = h(
      "div",
      { class: "chart-body" },
      scale,
      h("div", { class: "cost-bars" }, this.svg, this.empty),
    );
    const keys = {
      tabindex: "0",
      role: "group",
      "aria-label": "Cost over time. Use the arrow keys to read one step.",
    };
    this.plot = h("div", { class: "plot chart", ...keys }, this.value, body, this.axis);
    this.budgets = h("ul", { class: "budgets", "aria-label": "Budgets of this month" });
    this.element = h(
      "section",
      { class: "costs" },
      h("div", { class: "timeline-head" }, this.title, this.about),
      this.plot,
      this.legend,
      this.budgets,
    );
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.read(undefined));
    this.plot.addEventListener("keydown", (event) => this.step(event));
    this.plot.addEventListener("blur", () => this.read(undefined));
    this.element.hidden = true;
  }

  forget() {
    this.question.forget();
  }

  // `bounds`: range, or from and to. `pick(rows)` returns the rows that match the filter. `nameOf(row)`: its name.
  show(bounds, by, pick, nameOf) {
    const hours = hoursOf(bounds);
    const step = hours <= MOST_HOURS ? "hour" : "day";
    const { state, data } = this.question.want(
      `api/v1/costs?${new URLSearchParams(bounds)}&by=${encodeURIComponent(by)}&step=${step}`,
      EVERY_SECONDS,
    );
    const isReady = state === "ready" && hours > 1;
    const rows = isReady ? pick(data.rows ?? []) : [];
    const written = JSON.stringify([data?.to, data?.by, rows.map(nameOf)]);
    this.element.hidden = !rows.length;
    if (!rows.length || (data === this.data && written === this.written)) return;
    this.data = data;
    this.written = written;
    this.bars = barsOf(data, rows, nameOf);
    this.draw();
  }

  draw() {
    const { bars, data } = this;
    setText(this.title, bars.isCost ? "Cost over time" : "GPU-hours over time");
    setText(this.about, aboutText(data, bars));
    setText(this.top, bars.write(bars.most));
    place(this.svg, shapesOf(bars));
    this.showEmpty();
    const length = bars.steps;
    const every = Math.ceil(length / MOST_TICKS);
    const ticks = [];
    for (let i = 0; i < length; i += every) {
      const tick = h("span", {}, bars.timeText(i));
      tick.style.left = `${(100 * (i + 0.5)) / length}%`;
      ticks.push(tick);
    }
    place(this.axis, ticks);
    place(this.legend, legendOf(bars));
    place(
      this.budgets,
      bars.budgets.map((budget) => budgetItem(budget, bars.exact)),
    );
    this.budgets.hidden = !bars.budgets.length;
    this.read(undefined);
  }

  // Says in the empty part of a young history that there are no records.
  showEmpty() {
    const { bars } = this;
    const first = firstKnown(bars.sums);
    this.empty.hidden = !(first >= LEAST_EMPTY * bars.steps);
    this.empty.style.width = `${(100 * first) / bars.steps}%`;
    setText(this.empty, `no record before ${bars.timeText(first)}`);
  }

  point(event) {
    const { left, width } = this.svg.getBoundingClientRect();
    this.read(Math.floor(((event.clientX - left) / width) * this.bars.steps));
  }

  step(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1 };
    const last = this.bars.steps - 1;
    if (!(event.key in moves || event.key === "Home" || event.key === "End")) return;
    event.preventDefault();
    const next =
      event.key === "Home" ? 0 : event.key === "End" ? last : (this.at ?? last) + moves[event.key];
    this.read(next);
  }

  // Shows the values of one step. `at` is undefined if the pointer is elsewhere.
  read(at) {
    const { bars } = this;
    this.at = at === undefined ? undefined : Math.min(bars.steps - 1, Math.max(0, at));
    setText(this.value, this.at === undefined ? "Point at a bar to read it" : bars.textAt(this.at));
    [...this.svg.querySelectorAll(".cost-step")].forEach((group, i) =>
      group.classList.toggle("is-read", i === this.at),
    );
  }
}

// A small chart of cost and use for the first screen. It leads to the Cost view.
export class SmallCosts {
  constructor(element, onAnswer) {
    this.element = element;
    this.question = new Question(onAnswer);
    this.range = "14d";
    this.text = h("span");
    this.svg = svg("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      preserveAspectRatio: "none",
      "aria-hidden": "true",
    });
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
    const { state, data } = this.question.want(
      `api/v1/costs?range=${this.range}&by=namespace&step=${step}`,
      SMALL_SECONDS,
    );
    this.isMissing = state === "missing"; // an older podgpu
    if (state !== "ready" || data === this.data) return;
    this.data = data;
    const known = (data.totals?.steps?.gpu_hours ?? []).filter(Number.isFinite).length;
    if (known < FEWEST_DAYS && step === "day") {
      this.range = "24h"; // a new history has only hours
      return this.ask();
    }
    this.isDrawn = known > 0;
    if (this.isDrawn) this.draw(data);
  }

  draw(data) {
    const bars = barsOf(data, data.rows ?? [], (row) => row.namespace ?? "");
    const total = bars.isCost ? data.totals.cost : data.totals.gpu_hours;
    const use = data.totals.mean_use;
    const first = firstKnown(bars.sums); // a young history begins with its first record
    const steps = bars.steps - first;
    const length = plural(steps, bars.isDay ? "day" : "hour");
    setText(this.meaning, `bars: ${bars.isCost ? "cost" : "GPU-hours"}, line: use`);
    setText(
      this.text,
      [
        `${bars.isCost ? "Cost" : "GPU-hours"}, last ${length}: ${bars.write(total)}`,
        use !== undefined && `${percent(use)} used of what is held`,
      ]
        .filter(Boolean)
        .join(" \u00b7 "),
    );
    const sums = bars.sums.slice(first);
    const sum = { values: sums, tint: "others" };
    const shapes = shapesOf({
      ...bars,
      steps,
      sums,
      complete: bars.complete.slice(first),
      lines: [sum],
      previous: [],
      limit: undefined,
    });
    place(this.svg, [...shapes, useLine((data.totals.steps?.mean_use ?? []).slice(first))]);
  }
}

// The step of the first record.
function firstKnown(sums) {
  return Math.max(0, sums.findIndex(Number.isFinite));
}

// The use, from 0 to 100 %. It is interrupted where it is unknown.
function useLine(values) {
  const width = WIDTH / values.length;
  let shape = "";
  values.forEach((value, i) => {
    if (!Number.isFinite(value)) return;
    const place = `${((i + 0.5) * width).toFixed(1)},${(HEIGHT - HEIGHT * Math.min(1, value)).toFixed(2)}`;
    shape += Number.isFinite(values[i - 1]) ? `L${place}` : `M${place}h1L${place}`;
  });
  return svg("path", { class: "line", d: shape });
}

function hoursOf({ range, from, to }) {
  if (range === "month") return 31 * 24;
  if (range) return Number.parseInt(range, 10) * (range.endsWith("d") ? 24 : 1);
  return ((Number(to) || Date.now() / 1000) - Number(from)) / HOUR_SECONDS;
}

// Returns what is drawn: for each step, the parts of the stack, or undefined without a record.
function barsOf(data, rows, nameOf) {
  const isCost = rows.some((row) => row.steps?.cost?.some(Number.isFinite));
  const name = isCost ? "cost" : "gpu_hours";
  const write = isCost
    ? (value) => totalMoney(value, data.currency)
    : (value) => `${amount(value)} h`;
  const exact = isCost ? (value) => money(value, data.currency) : write;
  const lines = rows.map((row, i) => ({
    name: row.others ? "others" : nameOf(row),
    tint: tintOf(row, i),
    values: row.steps?.[name] ?? [],
    forecast: forecastText(row, data.currency),
  }));
  const totals = data.totals?.steps?.[name] ?? [];
  const isAll = rows.length === data.rows.length;
  const previous = isAll ? (data.previous?.totals?.steps?.[name] ?? []) : [];
  const sums = totals.map((total, i) => (Number.isFinite(total) ? sumAt(lines, i) : undefined));
  const isDay = data.step_seconds === DAY_SECONDS;
  const budgets = isCost
    ? (data.budgets ?? []).filter((budget) => rows.some((row) => isOf(budget, row)))
    : [];
  // One line only if every row has a budget: otherwise the stack and the line are not comparable.
  const isCovered = rows.every(
    (row) => row.unallocated || budgets.some((budget) => isOf(budget, row)),
  );
  const limit =
    isDay && budgets.length && isCovered
      ? budgets.reduce((sum, budget) => sum + budget.per_month, 0) / daysOfMonth(data.to)
      : undefined;
  const most = Math.max(...[...sums, ...previous, limit].filter(Number.isFinite), 0) || 1;
  const timeText = (i) => {
    const at = data.from + i * data.step_seconds;
    return isDay ? DAY_TEXT.format(new Date(at * 1000)) : clock(at);
  };
  const textAt = (i) => {
    const partly = data.complete?.[i] || sums[i] === undefined ? "" : " (not complete)";
    const parts = lines
      .filter(({ values }) => values[i] > 0)
      .map((line) => `${line.name} ${exact(line.values[i])}`);
    const total = sums[i] === undefined ? "no record" : `${exact(sums[i])}${partly}`;
    const before = Number.isFinite(previous[i]) ? `period before ${exact(previous[i])}` : "";
    return [`${timeText(i)}: ${total}`, ...parts, before].filter(Boolean).join(" \u00b7 ");
  };
  return {
    isCost,
    isDay,
    isAll,
    write,
    exact,
    lines,
    sums,
    previous,
    budgets,
    limit,
    most,
    steps: totals.length,
    complete: data.complete ?? [],
    timeText,
    textAt,
  };
}

function isOf(budget, row) {
  if (row.unallocated || row.others || row.hidden) return false;
  return budget.label ? row.label === budget.value : row.namespace === budget.namespace;
}

function daysOfMonth(unix) {
  const at = new Date(unix * 1000);
  return new Date(Date.UTC(at.getUTCFullYear(), at.getUTCMonth() + 1, 0)).getUTCDate();
}

// Says how much of a budget is used, with a bar. The mark on the bar is the forecast.
function budgetItem(budget, exact) {
  const name = budget.label ? `${budget.label}=${budget.value}` : budget.namespace;
  const forecast = budget.forecast === undefined ? "" : `, forecast ${exact(budget.forecast)}`;
  const isOver = budget.cost > budget.per_month;
  const isAhead = !isOver && budget.forecast > budget.per_month;
  const fill = h("span", { class: "budget-fill" });
  fill.style.width = `${100 * Math.min(1, budget.ratio)}%`;
  const text = `${exact(budget.cost)} of ${exact(budget.per_month)} this month (${percent(budget.ratio)})${forecast}`;
  const sign = isOver ? "over budget" : isAhead ? "forecast over budget" : "";
  return h(
    "li",
    { class: isOver || isAhead ? "is-over" : "" },
    h("bdi", {}, plain(name)),
    h("span", { class: "budget-track", "aria-hidden": "true" }, fill),
    h("span", {}, text),
    sign && h("strong", {}, sign),
  );
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
  const y = (value) => HEIGHT - (HEIGHT - 1) * (value / most);
  const groups = sums.map((sum, i) => {
    const from = (i + GAP / 2) * width;
    const until = (i + 1 - GAP / 2) * width;
    const box = (low, high, kind) =>
      svg("path", {
        class: kind,
        d: `M${from.toFixed(1)},${y(low).toFixed(2)}V${y(high).toFixed(2)}H${until.toFixed(1)}V${y(low).toFixed(2)}Z`,
      });
    // Without a record, there is no bar: it would look like a cost.
    if (sum === undefined)
      return svg(
        "g",
        { class: "cost-step" },
        svg("path", {
          class: "cost-gap",
          d: `M${from.toFixed(1)},${HEIGHT - 2}H${until.toFixed(1)}`,
        }),
      );
    let low = 0;
    const parts = [];
    for (const { values, tint } of lines) {
      if (!(values[i] > 0)) continue;
      parts.push(box(low, low + values[i], `cost-${tint}`));
      low += values[i];
    }
    return svg("g", { class: `cost-step${complete[i] ? "" : " is-partial"}` }, ...parts);
  });
  let line = "";
  previous.forEach((value, i) => {
    if (!Number.isFinite(value)) return;
    line += `M${(i * width).toFixed(1)},${y(value).toFixed(2)}H${((i + 1) * width).toFixed(1)}`;
  });
  const shapes = [...groups, svg("path", { class: "cost-before", d: line })];
  if (limit !== undefined)
    shapes.push(svg("path", { class: "cost-budget", d: `M0,${y(limit).toFixed(2)}H${WIDTH}` }));
  return shapes;
}

// Says what the current and the next month cost. Empty without a forecast.
function forecastText({ forecast, next_month: next }, currency) {
  if (forecast === undefined) return "";
  const after = next === undefined ? "" : `, next month ${totalMoney(next, currency)}`;
  return `${totalMoney(forecast, currency)} this month${after}`;
}

// The table below shows the costs of the period. The steps of the chart may begin later.
function legendOf({ lines, previous, limit, exact, sums, isDay, complete }) {
  const entry = (tint, ...text) =>
    h("li", {}, h("span", { class: `swatch cost-${tint}`, "aria-hidden": "true" }), ...text);
  const entries = lines.map(({ name, tint, forecast }) => {
    const meaning = tint === "free" ? "paid for, held by nobody" : "";
    const text = [meaning, forecast].filter(Boolean).join("; ");
    return entry(tint, h("bdi", {}, name), text ? ` (${text})` : "");
  });
  if (previous.some(Number.isFinite)) entries.push(entry("before", "period before"));
  if (limit !== undefined) entries.push(entry("budget", `budget per day ${exact(limit)}`));
  if (sums.some((sum, i) => sum !== undefined && !complete[i]))
    entries.push(h("li", {}, `pale: the ${isDay ? "day" : "hour"} is not complete`));
  const missing = sums.filter((sum) => sum === undefined).length;
  if (missing) entries.push(entry("gap", `no record: ${plural(missing, isDay ? "day" : "hour")}`));
  return entries;
}

function aboutText(data, { isCost, isDay, isAll }) {
  const { forecast, previous } = data;
  const unit = isDay ? "UTC days" : "hours";
  if (!isCost || !isAll) return unit;
  const price = (value) => totalMoney(value, data.currency);
  const texts = [unit];
  const compared = previous?.compared;
  if (compared?.previous_cost > 0) {
    const change = compared.cost / compared.previous_cost - 1;
    const words =
      Math.abs(change) < 0.005
        ? "the same as"
        : `${percent(Math.abs(change))} ${change > 0 ? "more" : "less"} than`;
    texts.push(
      `${words} in the period before (${price(compared.cost)}, before ${price(compared.previous_cost)}, in ${plural(compared.steps, isDay ? "complete day" : "complete hour")})`,
    );
  }
  if (forecast) {
    const last = DAY_TEXT.format(new Date((forecast.to - 1) * 1000));
    texts.push(
      `forecast until ${last}: ${price(forecast.cost)} = ${price(forecast.cost_so_far)} so far this month + ${price(forecast.cost_per_day)} a day (mean of ${plural(forecast.days, "complete day")})`,
    );
    if (forecast.next_month !== undefined) texts.push(`next month: ${price(forecast.next_month)}`);
  }
  return texts.join(" \u00b7 ");
}
