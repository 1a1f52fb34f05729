// Shows who waits for whom on a shared GPU: a row for each waiting holder, a column for each holder
// that used the GPU.

import { h, place, plain } from "./dom.js";
import { UNKNOWN } from "./format.js";
import { sumOf } from "./totals.js";

const MAX_COLUMNS = 6;
const OTHERS = "All others";
const LEAST_SECONDS = 0.005; // less is shown as <0.01
const ABOUT =
  "Seconds of the last reading in which a holder had work, but another one used the GPU.";

export class WaitMatrix {
  constructor() {
    this.head = h("tr");
    this.body = h("tbody");
    const table = h("table", { class: "waits" }, h("thead", {}, this.head), this.body);
    const title = "Who waits for whom";
    const attributes = { class: "scroll", tabindex: "0", role: "region", "aria-label": title };
    const scroll = h("div", attributes, table);
    const about = h("p", { class: "about" }, ABOUT);
    this.element = h("section", { hidden: true }, h("h3", {}, title), about, scroll);
  }

  show(device) {
    const waiters = waitersOf(device);
    const isShown = waiters.length > 1;
    this.element.hidden = !isShown;
    const matrix = isShown ? matrixOf(waiters) : { columns: [], rows: [] };
    const written = JSON.stringify(matrix);
    if (written === this.written) return;
    this.written = written;

    const titles = ["Waits for", ...matrix.columns, "Total"].map(plain);
    const heads = titles.map((title) => h("th", { scope: "col" }, h("bdi", {}, title)));
    place(this.head, heads);
    const rows = matrix.rows.map((row) => rowElement(row, titles.slice(1)));
    place(this.body, rows);
  }
}

function rowElement({ name, cells }, titles) {
  const row = h("tr", {}, h("th", { scope: "row" }, h("bdi", {}, plain(name))));
  cells.forEach((text, i) => {
    const isSelf = text === UNKNOWN;
    row.append(h("td", { class: isSelf && "is-self", "data-title": titles[i] }, text));
  });
  return row;
}

// Returns the holders whose waiting is known now.
function waitersOf(device) {
  if (!device || device.absent || device.old) return [];
  return device.holders.filter((holder) => holder.waited !== undefined);
}

// Returns the texts of the table. Holders that cause short waits share one column if there are
// many.
function matrixOf(waiters) {
  const runners = runnersOf(waiters);
  const keys = longestOf(runners);
  const hasOthers = keys.length < runners.size;
  const columns = keys.map((key) => runners.get(key).title);
  if (hasOthers) columns.push(OTHERS);

  const rows = waiters.map((holder) => {
    const cells = keys.map((key) => {
      const isSelf = key === keyOf(holder);
      return isSelf ? UNKNOWN : secondsText(holder, (runner) => runner === key);
    });
    if (hasOthers) cells.push(secondsText(holder, (runner) => !keys.includes(runner)));
    cells.push(secondsText(holder, () => true));
    return { name: titleOf(holder), cells };
  });
  return { columns, rows };
}

// Returns all holders with the seconds that others waited for them.
function runnersOf(waiters) {
  const runners = new Map();
  for (const holder of waiters) {
    runners.set(keyOf(holder), { title: titleOf(holder), seconds: 0 });
  }
  for (const runner of waiters.flatMap((holder) => holder.waitsFor)) {
    const key = keyOf(runner);
    if (!runners.has(key)) runners.set(key, { title: runner.name, seconds: 0 });
    runners.get(key).seconds += runner.seconds;
  }
  return runners;
}

// Returns the keys of the holders with a column of their own.
function longestOf(runners) {
  const keys = [...runners.keys()];
  if (keys.length <= MAX_COLUMNS) return keys;
  const secondsOf = (key) => runners.get(key).seconds;
  const longest = keys.toSorted((a, b) => secondsOf(b) - secondsOf(a));
  const shown = longest.slice(0, MAX_COLUMNS - 1);
  return keys.filter((key) => shown.includes(key));
}

function keyOf({ name, container }) {
  return `${name}\u0000${container}`;
}

function titleOf({ name, shownContainer }) {
  return [name, shownContainer].filter(Boolean).join("/");
}

// Adds up how long a holder waited for the runners that `isCounted(key)` selects.
function secondsText({ waitsFor }, isCounted) {
  const counted = waitsFor.filter((runner) => isCounted(keyOf(runner)));
  const seconds = sumOf(counted.map((runner) => runner.seconds));
  const isTiny = seconds > 0 && seconds < LEAST_SECONDS;
  return isTiny ? "<0.01" : seconds.toFixed(2);
}
