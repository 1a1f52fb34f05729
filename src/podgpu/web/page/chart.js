// A chart of one metric over time. It has one line per device, a scale, and the available width.

import { h, place, setText, svg } from "./dom.js";
import { dotted, UNKNOWN } from "./format.js";
import { areaOf, pointsText, runsOf } from "./shapes.js";

const WIDTH = 1000;
const HEIGHT = 100;
const MOST_TINTED = 4; // if there are more lines, all have one colour, and their mean is added
const NARROWEST_SPAN = 2; // a shorter problem is drawn as a line

export class Chart {
  // `write` formats a value. `most(values)` returns the value of the top edge.
  constructor(name, write, most) {
    this.write = write;
    this.most = most;
    this.value = h("span", { class: "chart-value" });
    this.top = h("span");
    this.bottom = h("span");
    this.legend = h("ul", { class: "chart-legend" });
    this.svg = svg("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      preserveAspectRatio: "none",
      "aria-hidden": "true",
    });
    const head = h(
      "figcaption",
      { class: "chart-head" },
      h("span", { class: "chart-name" }, name),
      this.legend,
      this.value,
    );
    const scale = h("div", { class: "chart-scale", "aria-hidden": "true" }, this.top, this.bottom);
    this.element = h(
      "figure",
      { class: "chart" },
      head,
      h("div", { class: "chart-body" }, scale, this.svg),
    );
  }

  // `axis`: from, to and step in seconds. `lines`: name and values, a number or null for each step
  // from `from` on. Among many lines, the one with `isMarked` has its own colour. `top`: the
  // maximum, if it is known.
  show(axis, lines, marks, ticks, top) {
    this.lines = lines;
    const known = lines.flatMap(({ values }) => values.filter(Number.isFinite));
    this.element.hidden = !known.length;
    if (!known.length) return;

    const isTopValid = top > 0 && known.every((value) => value <= top);
    const most = isTopValid ? top : this.most(known) || 1;
    setText(this.top, this.write(most));
    setText(this.bottom, this.write(0));

    const x = (at) => ((at - axis.from) / (axis.to - axis.from)) * WIDTH;
    const drawing = new Drawing(axis, x, most);
    const grid = ticks.map((at) => drawing.vertical(at, "grid"));
    const problems = marks.map((mark) => drawing.mark(mark));
    place(this.svg, [...grid, ...problems, ...this.paths(drawing)]);
    place(this.legend, this.legendEntries());
    this.legend.hidden = lines.length < 2;
    this.summary = meanAndMax(known, this.write);
    setText(this.value, this.summary);
  }

  get isMany() {
    return this.lines.length > MOST_TINTED;
  }

  get marked() {
    return this.isMany ? this.lines.find((line) => line.isMarked) : undefined;
  }

  paths(drawing) {
    const { lines, marked } = this;
    if (lines.length === 1) {
      const [{ values }] = lines;
      return [drawing.area(values), drawing.line(values, "line line-1")];
    }
    if (!this.isMany)
      return lines.map(({ values }, i) => drawing.line(values, `line line-${i + 1}`));

    const paths = lines.map(({ values }) => drawing.line(values, "line is-many"));
    paths.push(drawing.line(meanOf(lines), "line line-1"));
    if (marked) paths.push(drawing.line(marked.values, "line line-2"));
    return paths;
  }

  legendEntries() {
    const { lines, marked } = this;
    if (!this.isMany) return lines.map(({ name }, i) => legendEntry(i + 1, name));
    const entries = [
      legendEntry(1, `mean of ${lines.length}`),
      legendEntry("many", "each of them"),
    ];
    if (marked) entries.push(legendEntry(2, `slowest: ${marked.name}`));
    return entries;
  }

  // Shows the values at `step`, which is undefined if the pointer is elsewhere.
  read(step) {
    if (this.element.hidden) return "";
    const text = step === undefined ? this.summary : this.textAt(step);
    setText(this.value, text);
    return text;
  }

  textAt(step) {
    const known = this.lines.filter(({ values }) => Number.isFinite(values[step]));
    const values = known.map((line) => line.values[step]);
    if (!known.length) return UNKNOWN;
    if (this.lines.length === 1) return this.write(values[0]);
    if (this.isMany) return meanAndRange(values, this.write);
    return dotted(known.map(({ name }, i) => `${name} ${this.write(values[i])}`));
  }
}

function legendEntry(tint, name) {
  return h("li", {}, h("span", { class: `swatch tint-${tint}`, "aria-hidden": "true" }), name);
}

function meanAndMax(values, write) {
  return dotted([meanText(values, write), `max ${write(largest(values))}`]);
}

function meanAndRange(values, write) {
  const least = values.reduce((least, value) => Math.min(least, value), Infinity);
  return dotted([meanText(values, write), `${write(least)} to ${write(largest(values))}`]);
}

function meanText(values, write) {
  return `mean ${write(mean(values))}`;
}

// Not Math.max(...values): there may be more values than a call can have arguments.
function largest(values) {
  return values.reduce((most, value) => Math.max(most, value), -Infinity);
}

function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

// Returns the mean of the lines for each step; null where no line has a value.
function meanOf(lines) {
  const length = lines.reduce((longest, { values }) => Math.max(longest, values.length), 0);
  return Array.from({ length }, (_, i) => {
    const known = lines.map(({ values }) => values[i]).filter(Number.isFinite);
    return known.length ? mean(known) : null;
  });
}

// Draws on the axis of a chart. `x(at)` is the position of a time; `most`: value of the top edge.
class Drawing {
  constructor(axis, x, most) {
    this.axis = axis;
    this.x = x;
    this.most = most;
  }

  line(values, kind) {
    const shapes = this.runs(values).map((run) => `M${pointsText(run, 2)}`);
    return svg("path", { class: kind, d: shapes.join("") });
  }

  area(values) {
    const shapes = this.runs(values).map((run) => areaOf(run, pointsText(run, 2), HEIGHT));
    return svg("path", { class: "area", d: shapes.join("") });
  }

  // A single value becomes a short dash.
  runs(values) {
    const { from, step } = this.axis;
    const dash = this.x(from + step) / 2;
    const x = (i) => this.x(from + i * step);
    const y = (value) => HEIGHT - (HEIGHT - 1) * Math.min(1, value / this.most);
    const runs = runsOf(values, x, y);
    for (const run of runs) {
      const [first] = run;
      if (run.length === 1) run.push({ x: first.x + dash, y: first.y });
    }
    return runs;
  }

  vertical(at, kind) {
    return svg("path", { class: kind, d: `M${this.x(at).toFixed(1)},0V${HEIGHT}` });
  }

  mark({ at, until = at, severity }) {
    const left = this.x(Math.max(this.axis.from, at));
    const right = this.x(Math.min(this.axis.to, until));
    if (right - left > NARROWEST_SPAN) {
      const shape = `M${left},0H${right}V${HEIGHT}H${left}Z`;
      return svg("path", { class: `mark mark-span is-${severity}`, d: shape });
    }
    const shape = `M${left},0V${HEIGHT}`;
    return svg("path", { class: `mark mark-moment is-${severity}`, d: shape });
  }
}
