// A chart of one metric over time. It has one line per device, a scale, and the available width.

import { h, place, setText, svg } from "./dom.js";
import { UNKNOWN } from "./format.js";

const WIDTH = 1000;
const HEIGHT = 100;
const MOST_TINTED = 4; // if there are more lines, all have one colour, and their mean is added

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

  // `axis`: from, to and step in seconds. `lines`: name and values, a number or null for each step from `from` on. Among
  // many lines, the one with `isMarked` has its own colour.
  // `top`: the maximum, if it is known.
  show(axis, lines, marks, ticks, top) {
    this.lines = lines;
    const known = lines.flatMap(({ values }) => values.filter((value) => Number.isFinite(value)));
    this.element.hidden = !known.length;
    if (!known.length) return;
    const most = top > 0 && known.every((value) => value <= top) ? top : this.most(known) || 1;
    setText(this.top, this.write(most));
    setText(this.bottom, this.write(0));
    const x = (at) => ((at - axis.from) / (axis.to - axis.from)) * WIDTH;
    const many = lines.length > MOST_TINTED;
    const paths = lines.map(({ values }, i) =>
      path(values, axis, x, most, many ? "line is-many" : `line line-${i + 1}`),
    );
    if (lines.length === 1) paths.unshift(path(lines[0].values, axis, x, most, "area", true));
    const marked = many ? lines.find((line) => line.isMarked) : undefined;
    if (many) paths.push(path(meanOf(lines), axis, x, most, "line line-1"));
    if (marked) paths.push(path(marked.values, axis, x, most, "line line-2"));
    const grid = ticks.map((at) =>
      svg("path", { class: "grid", d: `M${x(at).toFixed(1)},0V${HEIGHT}` }),
    );
    place(this.svg, [...grid, ...marks.map((mark) => markShape(mark, axis, x)), ...paths]);
    place(
      this.legend,
      many
        ? [
            legendEntry(1, `mean of ${lines.length}`),
            legendEntry("many", "each of them"),
            ...(marked ? [legendEntry(2, `slowest: ${marked.name}`)] : []),
          ]
        : lines.map(({ name }, i) => legendEntry(i + 1, name)),
    );
    this.legend.hidden = lines.length < 2;
    this.rest = restText(known, this.write);
    setText(this.value, this.rest);
  }

  // Shows the values at `step`, which is undefined if the pointer is elsewhere.
  read(step) {
    if (this.element.hidden) return "";
    const text = step === undefined ? this.rest : this.textAt(step);
    setText(this.value, text);
    return text;
  }

  textAt(step) {
    const at = this.lines
      .map(({ name, values }) => [name, values[step]])
      .filter(([, value]) => Number.isFinite(value));
    if (!at.length) return UNKNOWN;
    if (this.lines.length === 1) return this.write(at[0][1]);
    if (this.lines.length <= MOST_TINTED)
      return at.map(([name, value]) => `${name} ${this.write(value)}`).join(" \u00b7 ");
    return restText(
      at.map(([, value]) => value),
      this.write,
      true,
    );
  }
}

function legendEntry(tint, name) {
  return h("li", {}, h("span", { class: `swatch tint-${tint}`, "aria-hidden": "true" }), name);
}

function restText(values, write, withLeast = false) {
  let [least, most, sum] = [Infinity, -Infinity, 0];
  for (const value of values) {
    least = Math.min(least, value);
    most = Math.max(most, value);
    sum += value;
  }
  const mean = `mean ${write(sum / values.length)}`;
  return withLeast
    ? `${mean} \u00b7 ${write(least)} to ${write(most)}`
    : `${mean} \u00b7 max ${write(most)}`;
}

function meanOf(lines) {
  const longest = lines.reduce((length, { values }) => Math.max(length, values.length), 0);
  return Array.from({ length: longest }, (_, i) => {
    const known = lines.map(({ values }) => values[i]).filter((value) => Number.isFinite(value));
    return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
  });
}

// Returns the path of a line. It is interrupted where values are unknown. A single value becomes a short dash.
function path(values, axis, x, most, kind, isArea = false) {
  const step = x(axis.from + axis.step);
  let shape = "";
  let run = [];
  const finish = () => {
    if (run.length === 1) run.push([run[0][0] + step / 2, run[0][1]]);
    if (run.length) {
      const line = run.map(([at, y]) => `${at.toFixed(1)},${y.toFixed(2)}`).join("L");
      shape += isArea
        ? `M${run[0][0].toFixed(1)},${HEIGHT}L${line}L${run.at(-1)[0].toFixed(1)},${HEIGHT}Z`
        : `M${line}`;
    }
    run = [];
  };
  values.forEach((value, i) => {
    if (!Number.isFinite(value)) finish();
    else
      run.push([x(axis.from + i * axis.step), HEIGHT - (HEIGHT - 1) * Math.min(1, value / most)]);
  });
  finish();
  return svg("path", { class: kind, d: shape });
}

function markShape(mark, axis, x) {
  const from = x(Math.max(axis.from, mark.at));
  const until = x(Math.min(axis.to, mark.until ?? mark.at));
  const width = Math.max(0, until - from);
  const shape = width > 2 ? `M${from},0H${until}V${HEIGHT}H${from}Z` : `M${from},0V${HEIGHT}`;
  return svg("path", {
    class: `mark ${width > 2 ? "mark-span" : "mark-moment"} is-${mark.severity}`,
    d: shape,
  });
}
