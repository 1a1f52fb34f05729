// The tab Waste: what is wasted, by whom, and which GPUs could be given back, and what the pods would notice: one line per recommendation, with the figures of its pods.

import { noneText, Question } from "./ask.js";
import { podHash, wordsOf, writeHash } from "./criteria.js";
import { fact, h, place, plain, setAttribute, setText } from "./dom.js";
import {
  amount,
  duration,
  localTimes,
  memory,
  money,
  parts,
  percent,
  plural,
  span,
  totalMoney,
  UNKNOWN,
} from "./format.js";
import { Table } from "./table.js";
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
const SHORT_UNKNOWN = "There is nothing to recommend from this range.";

export class Savings {
  constructor(onAnswer) {
    this.question = new Question(onAnswer);
    this.limit = AT_ONCE;
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
    this.sharedTable = sortable("Pods that share GPUs already");
    this.shared = h(
      "section",
      {},
      h("h2", {}, "Pods that share GPUs already"),
      this.sharedAbout,
      this.sharedTable.element,
    );
    this.notes = h("p", { class: "message" });
    const tabs = (label, links) => h("nav", { class: "tabs", "aria-label": label }, ...links);
    this.waste = new WasteSummary(onAnswer);
    const head = h("div", { class: "table-head" }, tabs("Range", this.ranges));
    const kinds = h("div", { class: "table-head" }, tabs("Kind", this.kinds), this.about, this.csv);
    const title = h("h2", { class: "savings-title" }, "What could be given back?");
    this.element = h(
      "div",
      { class: "savings" },
      head,
      this.waste.element,
      title,
      kinds,
      this.sums,
      this.message,
      this.list,
      this.more,
      this.left,
      this.shared,
      this.notes,
    );
    this.more.addEventListener("click", () => {
      this.limit += AT_ONCE;
      this.drawn = undefined;
      this.draw();
    });
  }

  leave() {
    this.question.forget();
    this.waste.forget();
  }

  // `waiting`: how many pods wait for GPUs; undefined if it is not known.
  show(criteria, waiting) {
    const range = RANGES.includes(criteria.range) ? criteria.range : "7d";
    const kind = criteria.by in KINDS ? criteria.by : "";
    const here = {
      view: "savings",
      q: criteria.q,
      cluster: criteria.cluster,
      ns: criteria.ns,
      range,
      by: kind,
    };
    RANGES.forEach((other, i) => mark(this.ranges[i], { ...here, range: other }, other === range));
    Object.keys(KINDS).forEach((other, i) =>
      mark(this.kinds[i], { ...here, by: other }, other === kind),
    );
    const url = `api/v1/savings?range=${range}`;
    setAttribute(this.csv, "href", `${url}&format=csv`);
    const { state, data, message } = this.question.want(url, EVERY_SECONDS);
    this.waste.show(range, criteria, waiting, data);
    const lines = (data?.advice ?? []).filter((line) => isMatch(line, kind, criteria));
    const isFiltered = Boolean(criteria.q || criteria.cluster || criteria.ns || kind);
    this.current = {
      data,
      lines,
      key: JSON.stringify([kind, criteria.q, criteria.cluster, criteria.ns]),
    };
    const none = data?.advice?.length && isFiltered ? "No line matches the filter." : SHORT_UNKNOWN;
    this.message.hidden = lines.length > 0;
    this.isShort = data?.computed === false; // the first note says what is missing
    const reason = this.isShort ? localTimes(data.notes?.[0] ?? SHORT_UNKNOWN) : none;
    setText(this.message, state === "ready" ? reason : noneText(state, message, MISSING));
    this.csv.hidden = !data?.advice?.length;
    setText(this.about, data ? span(data.from, data.to) : "");
    this.draw();
  }

  // Draws only new data, so that opened lines stay open.
  draw() {
    const { data, lines, key } = this.current;
    if (data === this.drawn && key === this.drawnKey) return;
    this.drawn = data;
    this.drawnKey = key;
    place(this.sums, data && !this.isShort ? sumsOf(data) : []);
    place(
      this.list,
      lines.slice(0, this.limit).map((line) => lineOf(line, data)),
    );
    this.more.hidden = lines.length <= this.limit;
    setText(this.more, `Show more: ${plural(lines.length - this.limit, "line")} left`);
    this.showLeft(data?.left_out ?? []);
    this.showShared(data);
    setText(
      this.notes,
      (data?.notes ?? [])
        .slice(this.isShort ? 1 : 0)
        .map(localTimes)
        .join(" \u00b7 "),
    );
  }

  showLeft(rows) {
    this.left.hidden = !rows.length;
    const pods = rows.reduce((sum, row) => sum + row.pods, 0);
    setText(this.leftSummary, `${plural(pods, "pod")} without a recommendation`);
    place(
      this.leftList,
      rows.map((row) =>
        h("li", {}, `${plain(row.says)}: ${plural(row.pods, "pod")}, ${gpus(row.gpus)}`),
      ),
    );
  }

  showShared(data) {
    const rows = data?.shared ?? [];
    this.shared.hidden = !rows.length;
    if (!rows.length) return;
    const points = (ratio) => `${(100 * ratio).toFixed(1)}\u202fpoints`;
    setText(
      this.sharedAbout,
      `What the model predicts from their busy time, and what was measured. Mean error: ${points(data.prediction_error_ratio)}.`,
    );
    const share = (name, title) => ({ name, title, value: (row) => row[name], write: tenths });
    const error = (row) => Math.abs(row.predicted_wait - row.measured_wait);
    const columns = [
      { name: "pod", title: "Pod", value: nameOf, link: linkOf },
      { name: "node", title: "Node", value: (row) => row.node },
      share("busy", "Busy"),
      share("predicted_wait", "Wait predicted"),
      share("measured_wait", "Wait measured"),
      { name: "error", title: "Error", value: error, write: points },
    ];
    this.sharedTable.show(rows, columns, this.sharedTable.order ?? "error", nameOf);
  }
}

// A table with its own order. That of other tables is in the address.
function sortable(label) {
  const table = new Table(
    label,
    (order) => {
      const [rows, columns, , keyOf] = table.shown;
      table.show(rows, columns, order, keyOf);
    },
    false,
  );
  return table;
}

function mark(link, hash, isChosen) {
  setAttribute(link, "href", writeHash(hash));
  setAttribute(link, "aria-current", isChosen ? "page" : undefined);
}

function isMatch(line, kind, { q, cluster, ns }) {
  if (kind && line.kind !== kind) return false;
  const words = wordsOf(q);
  const of = (pod) => {
    const text =
      `${nameOf(pod)}\n${pod.owner ? `${pod.owner.kind}/${pod.owner.name}` : ""}\n${pod.node ?? ""}\n${line.model ?? ""}`.toLowerCase();
    return (
      (!cluster || pod.cluster === cluster) &&
      (!ns || pod.namespace === ns) &&
      words.every((word) => text.includes(word))
    );
  };
  return line.pods.some(of);
}

function sumsOf({ totals, kinds, currency }) {
  const month = (monthly) =>
    monthly.cost === undefined
      ? gpus(monthly.gpus)
      : `${gpus(monthly.gpus)}, ${totalMoney(monthly.cost, currency)} per month`;
  const facts = [
    fact("Held now", month(filled(totals.before))),
    fact("Could be given back", month(filled(totals.saved))),
    fact("GPU-hours per month", amount(filled(totals.saved).gpu_hours)),
    fact("Left", month(filled(totals.after))),
  ];
  for (const { kind, lines, saved } of kinds) {
    if (lines && kind !== "pack") facts.push(fact(KINDS[kind], month(filled(saved))));
  }
  if (totals.packed_gpus) facts.push(fact("Pack", `${gpus(totals.packed_gpus)} free together`));
  return facts;
}

// The server leaves out zeros.
function filled(monthly) {
  return { gpus: 0, gpu_hours: 0, ...monthly };
}

function lineOf(line, { currency }) {
  const saved = filled(line.saved);
  const then = line.kind === "stop" ? "no GPU" : plain(line.target ?? "");
  const gain =
    line.kind === "pack" ? `${gpus(line.freed_gpus)} together` : `saves ${gpus(saved.gpus)}`;
  const price = saved.cost ? `, ${money(saved.cost, currency)} per month` : "";
  const names =
    line.pods.length > 3
      ? `${line.pods.slice(0, 2).map(nameOf).join(", ")} and ${plural(line.pods.length - 2, "pod")} more`
      : line.pods.map(nameOf).join(", ");
  const head = h(
    "summary",
    {},
    h("span", { class: `saving-kind saving-${line.kind}` }, KINDS[line.kind] ?? plain(line.kind)),
    h("bdi", { class: "saving-names" }, names),
    h("span", { class: "saving-then" }, `\u2192 ${then}`),
    h("span", { class: "saving-gain" }, gain + price),
  );
  const table = sortable("Pods of this line");
  table.show(line.pods, podColumns(line), "-pod", nameOf);
  const texts = h(
    "dl",
    { class: "saving-texts" },
    fact("Assumes", plain(line.assumes)),
    fact("Wrong if", plain(line.falsified_by)),
  );
  const cost =
    line.cost === undefined ? "" : ` In this range, its GPUs cost ${money(line.cost, currency)}.`;
  return h(
    "li",
    {},
    h("details", {}, head, h("p", {}, `${plain(line.says)}${cost}`), table.element, texts),
  );
}

function podColumns(line) {
  const busy = (name, title) => ({
    name,
    title,
    value: (pod) => pod[name],
    write: line.kind === "share" ? tenths : parts,
  });
  const unit = line.kind === "share" ? "" : ", GPUs";
  const columns = [
    { name: "pod", title: "Pod", value: nameOf, link: linkOf },
    {
      name: "owner",
      title: "Owner",
      value: (pod) => (pod.owner ? `${pod.owner.kind}/${pod.owner.name}` : undefined),
    },
    {
      name: "node",
      title: "Node",
      value: (pod) => (pod.to_node ? `${pod.node} \u2192 ${pod.to_node}` : pod.node),
    },
    { name: "gpus", title: "GPUs", value: (pod) => pod.gpus, write: parts },
    busy("busy", `Busy alone${unit}`),
    busy("peak_busy", `Peak of 5 min${unit}`),
    { name: "wait", title: "Would wait", value: (pod) => pod.wait, write: tenths },
    {
      name: "slowdown",
      title: "Slowdown",
      value: (pod) => pod.slowdown,
      write: (factor) => factor.toFixed(2),
    },
    {
      name: "worst",
      title: "In the worst 5 min",
      value: (pod) => pod.worst_slowdown,
      write: (factor) => factor.toFixed(2),
    },
    { name: "memory", title: "Memory peak", value: (pod) => pod.peak_memory_bytes, write: memory },
    { name: "idle", title: "Idle for", value: (pod) => pod.idle_seconds, write: duration },
  ];
  return columns.filter((column) => line.pods.some((pod) => column.value(pod) !== undefined));
}

function tenths(ratio) {
  return ratio === undefined
    ? UNKNOWN
    : ratio >= 0.1
      ? percent(ratio)
      : `${(100 * ratio).toFixed(1)}\u202f%`;
}

function gpus(number) {
  return `${parts(number)} ${number === 1 ? "GPU" : "GPUs"}`;
}

function nameOf({ cluster, namespace, pod, job }) {
  return plain([cluster, namespace, pod || job].filter(Boolean).join("/"));
}

function linkOf({ cluster, namespace, pod }) {
  return pod ? podHash(namespace ?? "", pod, cluster) : undefined;
}
