// Shows who waits for whom on a shared GPU: a row for each waiting holder, a column for each holder that used the GPU.

import { h, place, plain } from "./dom.js";
import { UNKNOWN } from "./format.js";

const MAX_COLUMNS = 6;
const OTHERS = "All others";

export class WaitMatrix {
  constructor() {
    this.head = h("tr");
    this.body = h("tbody");
    const table = h("table", { class: "waits" }, h("thead", {}, this.head), this.body);
    const scroll = h(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": "Who waits for whom" },
      table,
    );
    const about = h(
      "p",
      { class: "about" },
      "Seconds of the last reading in which a holder had work, but another one used the GPU.",
    );
    this.element = h("section", { hidden: true }, h("h3", {}, "Who waits for whom"), about, scroll);
  }

  show(device) {
    const waiters =
      device && !device.absent && !device.old
        ? device.holders.filter((holder) => holder.waited !== undefined)
        : [];
    this.element.hidden = waiters.length < 2;
    const matrix = this.element.hidden ? { columns: [], rows: [] } : matrixOf(waiters);
    const written = JSON.stringify(matrix);
    if (written === this.written) return;
    this.written = written;
    const titles = ["Waits for", ...matrix.columns, "Total"];
    place(
      this.head,
      titles.map((title) => h("th", { scope: "col" }, h("bdi", {}, plain(title)))),
    );
    place(
      this.body,
      matrix.rows.map(({ name, cells }) => {
        const cell = (text, i) =>
          h(
            "td",
            { class: text === UNKNOWN && "is-self", "data-title": plain(titles[i + 1]) },
            text,
          );
        return h(
          "tr",
          {},
          h("th", { scope: "row" }, h("bdi", {}, plain(name))),
          ...cells.map(cell),
        );
      }),
    );
  }
}

// Returns the texts of the table. Holders that cause short waits share one column if there are many.
function matrixOf(waiters) {
  const titles = new Map(
    waiters.map((holder) => [
      keyOf(holder),
      [holder.name, holder.shownContainer].filter(Boolean).join("/"),
    ]),
  );
  const waitedFor = new Map(waiters.map((holder) => [keyOf(holder), 0])); // seconds that others waited for it
  for (const { waitsFor } of waiters) {
    for (const runner of waitsFor) {
      if (!titles.has(keyOf(runner))) titles.set(keyOf(runner), runner.name);
      waitedFor.set(keyOf(runner), (waitedFor.get(keyOf(runner)) ?? 0) + runner.seconds);
    }
  }
  const longest = [...waitedFor.keys()].sort((a, b) => waitedFor.get(b) - waitedFor.get(a));
  const shown = new Set(longest.length > MAX_COLUMNS ? longest.slice(0, MAX_COLUMNS - 1) : longest);
  const keys = [...waitedFor.keys()].filter((key) => shown.has(key));
  const hasOthers = keys.length < waitedFor.size;
  const rows = waiters.map((holder) => {
    const sum = (isCounted) =>
      holder.waitsFor.reduce(
        (total, runner) => total + (isCounted(keyOf(runner)) ? runner.seconds : 0),
        0,
      );
    const cells = keys.map((key) =>
      key === keyOf(holder) ? UNKNOWN : seconds(sum((runner) => runner === key)),
    );
    const others = hasOthers ? [seconds(sum((runner) => !shown.has(runner)))] : [];
    return {
      name: titles.get(keyOf(holder)),
      cells: [...cells, ...others, seconds(sum(() => true))],
    };
  });
  return { columns: [...keys.map((key) => titles.get(key)), ...(hasOthers ? [OTHERS] : [])], rows };
}

function keyOf({ name, container }) {
  return `${name}\u0000${container}`;
}

function seconds(number) {
  return number > 0 && number < 0.005 ? "<0.01" : number.toFixed(2);
}
