// The tab Waste: what is wasted, by whom, which GPUs could be given back, and what the pods would
// notice: one line per recommendation, with the figures of its pods.

import { noneText, Question } from "./ask.js";
import { isOfScope, podHash, wordsOf, writeHash } from "./criteria.js";
import { fact, h, place, plain, setAttribute, setTab, setText, tabs } from "./dom.js";
import {
  amount,
  dotted,
  duration,
  gpuCount,
  listed,
  localTimes,
  memory,
  money,
  parts,
  percent,
  plural,
  span,
  totalMoney,
} from "./format.js";
import { filledColumns, sortableTable } from "./table.js";
import { sumOf } from "./totals.js";
import { WasteSummary } from "./waste.js";

const EVERY_SECONDS = 300; // the figures change every 5 minutes
const RANGES = ["24h", "7d"];
const AT_ONCE = 50;
const KINDS = { "": "All", stop: "Stop", shrink: "Shrink", share: "Share", pack: "Pack" };
const MEANINGS = {
  "": "Everything that could be given back",
  stop: "Pods that did nothing",
  shrink: "Pods that fit fewer GPUs or a MIG instance",
  share: "Pods that fit together on one GPU",
  pack: "Free GPUs that no requested size fits, with moves that bring them together",
};
const MISSING = "This server computes no savings: its podgpu is older than this page.";
const MOST_NAMES = 3;
const SHARED_TITLE = "Pods that share GPUs already";
const SHARED_ABOUT = "What the model predicts from their busy time, and what was measured.";
const NOTHING = "There is nothing to recommend from this range.";

export class Savings {
  constructor(onAnswer) {
    this.question = new Question(onAnswer);
    this.limit = AT_ONCE;
    this.waste = new WasteSummary(onAnswer);
    this.ranges = RANGES.map((range) => h("a", {}, range));
    this.kinds = Object.entries(KINDS).map(([name, title]) =>
      h("a", { title: MEANINGS[name] }, title),
    );
    this.about = h("p", { class: "about" });
    this.csv = h("a", { class: "quiet", download: "" }, "CSV");
    this.sums = h("dl", { class: "facts sums" });
    this.message = h("p", { class: "message" });
    this.list = h("ul", { class: "saving-lines" });
    this.more = h("button", { type: "button", class: "more" });
    this.leftSummary = h("summary");
    this.leftList = h("ul", { class: "marks" });
    this.left = h("details", { class: "under-used" }, this.leftSummary, this.leftList);
    this.sharedAbout = h("p", { class: "about" });
    this.sharedTable = sortableTable(SHARED_TITLE);
    this.shared = h("section", {}, h("h2", {}, SHARED_TITLE), this.sharedAbout);
    this.shared.append(this.sharedTable.element);
    this.notes = h("p", { class: "message" });
    this.element = this.makeElement();
    this.more.addEventListener("click", () => {
      this.limit += AT_ONCE;
      this.drawn = undefined;
      this.draw();
    });
  }

  makeElement() {
    const kinds = tabs("Kind", this.kinds);
    return h(
      "div",
      { class: "savings" },
      h("div", { class: "table-head" }, tabs("Range", this.ranges)),
      this.waste.element,
      h("h2", { class: "savings-title" }, "What could be given back?"),
      h("div", { class: "table-head" }, kinds, this.about, this.csv),
      this.sums,
      this.message,
      this.list,
      this.more,
      this.left,
      this.shared,
      this.notes,
    );
  }

  leave() {
    this.question.forget();
    this.waste.forget();
  }

  // `waiting`: how many pods wait for GPUs; undefined if it is not known.
  show(criteria, waiting) {
    const range = RANGES.includes(criteria.range) ? criteria.range : "7d";
    const kind = criteria.by in KINDS ? criteria.by : "";
    this.linkTabs(criteria, range, kind);
    const url = `api/v1/savings?range=${range}`;
    setAttribute(this.csv, "href", `${url}&format=csv`);
    const answer = this.question.want(url, EVERY_SECONDS);
    const { data } = answer;
    this.waste.show(range, criteria, waiting, data);

    const { q, cluster, ns } = criteria;
    const all = data?.advice ?? [];
    const lines = all.filter((line) => isMatch(line, kind, criteria));
    this.current = { data, lines, key: JSON.stringify([kind, q, cluster, ns]) };
    // The first note says what is missing.
    this.isShort = data?.computed === false;
    this.message.hidden = lines.length > 0;
    setText(this.message, noneText(answer, MISSING, this.emptyText()));
    this.csv.hidden = !all.length;
    setText(this.about, data ? span(data.from, data.to) : "");
    this.draw();
  }

  linkTabs({ q, cluster, ns }, range, kind) {
    const here = { view: "savings", q, cluster, ns, range, by: kind };
    RANGES.forEach((other, i) => {
      setTab(this.ranges[i], writeHash({ ...here, range: other }), other === range);
    });
    Object.keys(KINDS).forEach((other, i) => {
      setTab(this.kinds[i], writeHash({ ...here, by: other }), other === kind);
    });
  }

  // Says why there is no line.
  emptyText() {
    const { data } = this.current;
    if (this.isShort) return localTimes(data.notes?.[0] ?? NOTHING);
    return data?.advice?.length ? "No line matches the filter." : NOTHING;
  }

  // Draws only new data, so that opened lines stay open.
  draw() {
    const { data, lines, key } = this.current;
    if (data === this.drawn && key === this.drawnKey) return;
    this.drawn = data;
    this.drawnKey = key;
    place(this.sums, data && !this.isShort ? sumsOf(data) : []);
    const elements = lines.slice(0, this.limit).map((line) => lineElement(line, data));
    place(this.list, elements);
    const left = lines.length - this.limit;
    this.more.hidden = left <= 0;
    setText(this.more, `Show more: ${plural(left, "line")} left`);
    this.showLeft(data?.left_out ?? []);
    this.showShared(data);
    const notes = data?.notes ?? [];
    // The message above has the first note.
    const others = this.isShort ? notes.slice(1) : notes;
    setText(this.notes, dotted(others.map(localTimes)));
  }

  // Shows the pods without a recommendation, by reason.
  showLeft(rows) {
    this.left.hidden = !rows.length;
    const pods = sumOf(rows.map((row) => row.pods));
    setText(this.leftSummary, `${plural(pods, "pod")} without a recommendation`);
    const items = rows.map((row) => {
      const size = listed([plural(row.pods, "pod"), gpuCount(row.gpus)]);
      return h("li", {}, `${plain(row.says)}: ${size}`);
    });
    place(this.leftList, items);
  }

  showShared(data) {
    const rows = data?.shared ?? [];
    this.shared.hidden = !rows.length;
    if (!rows.length) return;
    const error = points(data.prediction_error_ratio);
    setText(this.sharedAbout, `${SHARED_ABOUT} Mean error: ${error}.`);
    const share = (name, title) => ({ name, title, value: (row) => row[name], write: tenths });
    const columns = [
      { name: "pod", title: "Pod", value: nameOf, link: linkOf },
      { name: "node", title: "Node", value: (row) => row.node },
      share("busy", "Busy"),
      share("predicted_wait", "Wait predicted"),
      share("measured_wait", "Wait measured"),
      { name: "error", title: "Error", value: errorOf, write: points },
    ];
    this.sharedTable.show(rows, columns, this.sharedTable.order ?? "error", nameOf);
  }
}

function errorOf({ predicted_wait: predicted, measured_wait: measured }) {
  return Math.abs(predicted - measured);
}

function points(ratio) {
  return `${(100 * ratio).toFixed(1)}\u202fpoints`;
}

function isMatch(line, kind, criteria) {
  if (kind && line.kind !== kind) return false;
  const words = wordsOf(criteria.q);
  return line.pods.some((pod) => {
    const texts = [nameOf(pod), ownerOf(pod), pod.node, line.model];
    const text = texts.filter(Boolean).join("\n").toLowerCase();
    return isOfScope(pod, criteria) && words.every((word) => text.includes(word));
  });
}

function sumsOf({ totals, kinds, currency }) {
  const month = (monthly) => {
    const gpus = gpuCount(monthly.gpus);
    if (monthly.cost === undefined) return gpus;
    return `${gpus}, ${totalMoney(monthly.cost, currency)} per month`;
  };
  const saved = filled(totals.saved);
  const facts = [
    fact("Held now", month(filled(totals.before))),
    fact("Could be given back", month(saved)),
    fact("GPU-hours per month", amount(saved.gpu_hours)),
    fact("Left", month(filled(totals.after))),
  ];
  for (const { kind, lines, saved: ofKind } of kinds) {
    // Packing saves no GPU.
    if (lines && kind !== "pack") facts.push(fact(KINDS[kind], month(filled(ofKind))));
  }
  if (totals.packed_gpus) facts.push(fact("Pack", `${gpuCount(totals.packed_gpus)} free together`));
  return facts;
}

// The server leaves out zeros.
function filled(monthly) {
  return { gpus: 0, gpu_hours: 0, ...monthly };
}

function lineElement(line, { currency }) {
  const head = headElement(line, currency);
  const text = h("p", {}, `${plain(line.says)}${costText(line, currency)}`);
  const table = sortableTable("Pods of this line");
  table.show(line.pods, podColumns(line), "-pod", nameOf);
  const texts = h(
    "dl",
    { class: "saving-texts" },
    fact("Assumes", plain(line.assumes)),
    fact("Wrong if", plain(line.falsified_by)),
  );
  return h("li", {}, h("details", {}, head, text, table.element, texts));
}

function headElement(line, currency) {
  const title = KINDS[line.kind] ?? plain(line.kind);
  const target = line.kind === "stop" ? "no GPU" : plain(line.target ?? "");
  return h(
    "summary",
    {},
    h("span", { class: `saving-kind saving-${line.kind}` }, title),
    h("bdi", { class: "saving-names" }, namesText(line.pods)),
    h("span", { class: "saving-then" }, `\u2192 ${target}`),
    h("span", { class: "saving-gain" }, gainText(line, currency)),
  );
}

function namesText(pods) {
  if (pods.length <= MOST_NAMES) return pods.map(nameOf).join(", ");
  const shown = pods.slice(0, MOST_NAMES - 1);
  const others = plural(pods.length - shown.length, "pod");
  return `${shown.map(nameOf).join(", ")} and ${others} more`;
}

function gainText(line, currency) {
  const saved = filled(line.saved);
  const price = saved.cost && `${money(saved.cost, currency)} per month`;
  if (line.kind === "pack") return listed([`${gpuCount(line.freed_gpus)} together`, price]);
  return listed([`saves ${gpuCount(saved.gpus)}`, price]);
}

function costText({ cost }, currency) {
  if (cost === undefined) return "";
  return ` In this range, its GPUs cost ${money(cost, currency)}.`;
}

// Pods that could share one GPU have ratios of it. The others may have several GPUs.
function podColumns(line) {
  const isShare = line.kind === "share";
  const unit = isShare ? "" : ", GPUs";
  const writeBusy = isShare ? tenths : parts;
  const number = (name, title, field, write) => ({
    name,
    title,
    value: (pod) => pod[field],
    write,
  });
  const columns = [
    { name: "pod", title: "Pod", value: nameOf, link: linkOf },
    { name: "owner", title: "Owner", value: ownerOf },
    { name: "node", title: "Node", value: nodeText },
    number("gpus", "GPUs", "gpus", parts),
    number("busy", `Busy alone${unit}`, "busy", writeBusy),
    number("peak_busy", `Peak of 5 min${unit}`, "peak_busy", writeBusy),
    number("wait", "Would wait", "wait", tenths),
    number("slowdown", "Slowdown", "slowdown", hundredths),
    number("worst", "In the worst 5 min", "worst_slowdown", hundredths),
    number("memory", "Memory peak", "peak_memory_bytes", memory),
    number("idle", "Idle for", "idle_seconds", duration),
  ];
  return filledColumns(columns, line.pods);
}

function ownerOf({ owner }) {
  return owner ? `${owner.kind}/${owner.name}` : undefined;
}

function nodeText({ node, to_node: target }) {
  return target ? `${node} \u2192 ${target}` : node;
}

function hundredths(factor) {
  return factor.toFixed(2);
}

// Formats a ratio, with a decimal if it is small.
function tenths(ratio) {
  if (ratio >= 0.1) return percent(ratio);
  return `${(100 * ratio).toFixed(1)}\u202f%`;
}

function nameOf({ cluster, namespace, pod, job }) {
  return plain([cluster, namespace, pod || job].filter(Boolean).join("/"));
}

function linkOf({ cluster, namespace, pod }) {
  return pod ? podHash(namespace ?? "", pod, cluster) : undefined;
}
