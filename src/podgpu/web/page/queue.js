// Shows the pods that wait for GPUs: one line per reason, with the idle pods that could make room.
// The server makes all texts.

import { noneText, Question } from "./ask.js";
import { pastTime, podHash, wordsOf } from "./criteria.js";
import { fact, h, place, plain, setText } from "./dom.js";
import { count, dotted, duration, gpuCount, parts, perHour, plural } from "./format.js";
import { sortableTable, Table } from "./table.js";

const EVERY_SECONDS = 15;
const COUNT_SECONDS = 60; // in other views, which show only the number of pods
const AT_ONCE = 50;
const TITLES = {
  in_use: "In use",
  fragmented: "Spread",
  too_large: "Size",
  selector: "Selector",
  taint: "Taint",
  cordoned: "Cordoned",
  not_ready: "Not ready",
  other_in_use: "CPU, memory",
  other_too_large: "CPU, memory",
  not_offered: "Not offered",
  no_nodes: "No nodes",
  no_device: "No device",
  claim_missing: "No claim",
  claim_not_created: "No claim",
  class_missing: "No class",
  claim_node: "Claim",
  gated: "Held back",
  quota: "Quota",
  queued: "Queued",
  queue_missing: "No queue",
  preempting: "Preempting",
  nominated: "Reserved",
  unseen: "No scheduler",
  starting: "Starting",
  unchecked: "Other",
  fits: "Fits now",
  many: "Not explained",
};
const MISSING = [
  "This server does not read pods that wait for GPUs:",
  "its podgpu is older than this page, or it is an exporter.",
].join(" ");
const PATH = "api/v1/queue";
const NO_PAST = "The queue has no history: it shows only now.";
const NOBODY = "No pod waits for GPUs.";
const CLOSED_HINT = "On nodes that are cordoned or not ready. Not in the other columns";

export class Queue {
  constructor(onAnswer) {
    this.question = new Question(onAnswer);
    this.limit = AT_ONCE;
    this.sums = h("dl", { class: "facts sums" });
    this.message = h("p", { class: "message" });
    this.list = h("ul", { class: "saving-lines" });
    this.more = h("button", { type: "button", class: "more" });
    this.free = new Table("GPUs that nodes offer", (order) => this.showFree(order));
    this.freeSection = h("section", {}, h("h2", {}, "What is free"), this.free.element);
    this.notes = h("p", { class: "message" });
    this.element = h(
      "div",
      { class: "savings queue" },
      this.sums,
      this.message,
      this.list,
      this.more,
      this.freeSection,
      this.notes,
    );
    this.more.addEventListener("click", () => {
      this.limit += AT_ONCE;
      this.drawn = undefined;
      this.draw();
    });
  }

  leave() {} // the number in the tab stays

  // Returns the number of pods that wait, for the tab. Undefined if it is not known.
  count(isShown) {
    if (pastTime() || this.isMissing) return undefined;
    const every = isShown ? EVERY_SECONDS : COUNT_SECONDS;
    const { state, data } = this.question.want(PATH, every);
    // The view asks again.
    this.isMissing = !isShown && state === "missing";
    return state === "ready" ? (data.pods ?? 0) : undefined;
  }

  show(criteria) {
    /** @type {import("./ask.js").Answer} */
    const past = { state: "missing", message: NO_PAST };
    const answer = pastTime() ? past : this.question.want(PATH, EVERY_SECONDS);
    const { data } = answer;
    const groups = (data?.groups ?? []).filter((group) => isMatch(group, criteria));
    this.current = { data, groups, key: JSON.stringify([criteria.q, criteria.ns]) };
    this.message.hidden = groups.length > 0;
    setText(this.message, noneText(answer, MISSING, emptyText(data)));
    this.draw();
  }

  // Draws only new data, so that opened lines stay open.
  draw() {
    const { data, groups, key } = this.current;
    if (data === this.drawn && key === this.drawnKey) return;
    const opened = [...this.list.querySelectorAll("details[open]")];
    const openedKeys = new Set(opened.map((details) => details.dataset.key));
    this.drawn = data;
    this.drawnKey = key;
    place(this.sums, data ? sumsOf(data) : []);
    const shown = groups.slice(0, this.limit);
    const elements = shown.map((group) => lineElement(group, data, openedKeys));
    place(this.list, elements);
    const left = groups.length - this.limit;
    this.more.hidden = left <= 0;
    setText(this.more, `Show more: ${plural(left, "line")} left`);
    this.freeSection.hidden = !data?.free?.length;
    this.showFree(this.free.order ?? "-resource");

    const notes = (data?.notes ?? []).map(plain);
    if (data?.omitted_pods) {
      notes.push(`${plural(data.omitted_pods, "pod")} with other reasons are not listed`);
    }
    setText(this.notes, dotted(notes));
  }

  showFree(order) {
    const number = (name, title, hint) => ({
      name,
      title,
      hint,
      value: (row) => row[name] ?? 0,
      write: parts,
    });
    const columns = [
      { name: "resource", title: "Resource", value: (row) => row.resource },
      { name: "model", title: "Model", value: (row) => row.model },
      number("free", "Free"),
      number("total", "All"),
      number("largest", "Most on one node", "The largest number that is free on one node"),
      { name: "nodes", title: "Nodes", value: (row) => row.nodes, write: count },
    ];
    const rows = this.drawn?.free ?? [];
    if (rows.some((row) => row.closed)) {
      columns.push(number("closed", "Free on closed nodes", CLOSED_HINT));
    }
    this.free.show(rows, columns, order, (row) => `${row.resource}\n${row.model ?? ""}`);
  }
}

// Says why no line is shown.
function emptyText(data) {
  const hidden = data?.hidden_pods;
  if (data?.groups?.length) return "No waiting pod matches the filter.";
  if (!hidden) return NOBODY;
  return `${plural(hidden, "pod")} wait in namespaces that you may not see.`;
}

function isMatch(group, { q, ns }) {
  const words = wordsOf(q);
  const resources = group.needs.map((need) => need.resource);
  return group.examples.some((pod) => {
    if (ns && pod.namespace !== ns) return false;
    const text = [nameOf(pod), ownerOf(pod) ?? "", ...resources].join("\n").toLowerCase();
    return words.every((word) => text.includes(word));
  });
}

function sumsOf(data) {
  const { pods = 0, gpus = 0, hidden_pods: hidden, hidden_gpus: hiddenGpus = 0 } = data;
  const [oldest] = data.groups ?? [];
  const facts = [fact("Waiting", plural(pods, "pod")), fact("GPUs they need", parts(gpus))];
  if (oldest) facts.push(fact("Longest", duration(data.taken_at - oldest.since)));
  if (hidden) {
    const text = `${plural(hidden, "pod")}, ${parts(hiddenGpus)} GPUs`;
    facts.push(fact("In other namespaces", text));
  }
  return facts;
}

// `openedKeys`: keys of the lines that are open.
function lineElement(group, data, openedKeys) {
  const [cause, ...others] = group.reasons;
  const key = JSON.stringify([cause.key, group.examples[0], group.needs]);
  const details = h(
    "details",
    { "data-key": key, open: openedKeys.has(key) },
    headElement(group, cause, data),
    h("p", { class: "queue-do" }, plain(cause.do ?? "")),
    otherReasons(others),
    unblocking(group, data),
    factsOf(group),
    podsOf(group, data),
  );
  return h("li", {}, details);
}

function headElement(group, cause, data) {
  const title = TITLES[cause.key] ?? plain(cause.key);
  const kind = cause.key === "fits" ? "queue-fits" : "queue-waits";
  const size = `${gpuCount(group.gpus)}, ${duration(data.taken_at - group.since)}`;
  const head = h(
    "summary",
    {},
    h("span", { class: `saving-kind queue-kind ${kind}` }, title),
    h("bdi", { class: "saving-names" }, namesText(group)),
    h("span", { class: "saving-gain" }, size),
    h("span", { class: "queue-cause" }, plain(cause.says)),
  );
  if (group.message) {
    const text = `${speakerOf(group)}: ${plain(group.message)}`;
    head.append(h("span", { class: "queue-cause queue-message" }, text));
  }
  return head;
}

function namesText({ examples: [first], pods }) {
  // One row may stand for several pods.
  const others = pods - (first.pods ?? 1);
  if (others <= 0) return nameOf(first);
  return `${nameOf(first)} and ${plural(others, "pod")} more`;
}

function otherReasons(reasons) {
  if (!reasons.length) return undefined;
  const items = reasons.map((reason) => {
    const texts = [plain(reason.says), plain(reason.do ?? "")];
    return h("li", {}, texts.filter(Boolean).join(" "));
  });
  return h("section", {}, h("h2", {}, "Other nodes"), h("ul", { class: "marks" }, ...items));
}

function unblocking(group, data) {
  if (!group.unblock?.length) return undefined;
  const items = group.unblock.map((option) => unblockLine(option, data));
  const title = h("h2", {}, "Idle pods: it would fit if all of a line ended");
  return h("section", {}, title, h("ul", { class: "marks" }, ...items));
}

function unblockLine({ node, pods, cost_per_hour: cost }, data) {
  const line = h("span", {}, h("bdi", {}, plain(node)), ": ");
  pods.forEach((pod, i) => {
    if (i > 0) line.append("; ");
    line.append(...idlePod(pod, data));
  });
  if (cost !== undefined) line.append(`, ${perHour(cost, data.currency)}`);
  return h("li", {}, line);
}

function idlePod(pod, data) {
  const { namespace = "", pod: name = "", gpus = 0, hidden } = pod;
  const owner = ownerOf(pod);
  const idle = `${gpuCount(gpus)} idle for ${duration(data.taken_at - pod.idle_since)}`;
  const text = owner ? ` (${owner}), ${idle}` : `, ${idle}`;
  if (hidden) return [`a pod that you may not see${text}`];
  const link = h("a", { href: podHash(namespace, name, "") }, h("bdi", {}, nameOf(pod)));
  return [link, text];
}

function factsOf(group) {
  const facts = [fact("Each needs", group.needs.map((need) => plain(need.says)).join(", "))];
  if (group.message) facts.push(fact(speakerOf(group), plain(group.message)));
  return h("dl", { class: "saving-texts" }, ...facts);
}

function speakerOf(group) {
  return group.examples[0].kind ? "Kueue says" : "The scheduler says";
}

function podsOf(group, data) {
  const waitOf = (pod) => data.taken_at - pod.since;
  const columns = [
    { name: "pod", title: "Pod", value: nameOf },
    { name: "owner", title: "Owner", value: ownerOf },
    { name: "pods", title: "Pods", value: (pod) => pod.pods ?? 1, write: count },
    { name: "since", title: "Waits for", value: waitOf, write: duration },
  ];
  const table = sortableTable("Waiting pods of this line");
  table.show(group.examples, columns, "since", nameOf);
  return table.element;
}

// The name of a pod, or kind and name of the object that stands for pods.
function nameOf({ namespace, pod, kind }) {
  const path = [namespace, pod].filter(Boolean).join("/");
  return plain([kind, path].filter(Boolean).join(" "));
}

function ownerOf({ owner }) {
  return owner ? plain(`${owner.kind}/${owner.name}`) : undefined;
}
