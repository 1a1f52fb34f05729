// Shows the pods that wait for GPUs: one line per reason, with the idle pods that could make room. The server makes all texts.

import { noneText, Question } from "./ask.js";
import { pastTime, podHash, wordsOf } from "./criteria.js";
import { fact, h, place, plain, setText } from "./dom.js";
import { count, duration, parts, perHour, plural } from "./format.js";
import { Table } from "./table.js";

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
const MISSING =
  "This server does not read pods that wait for GPUs: its podgpu is older than this page, or it is an exporter.";
const PATH = "api/v1/queue";
const NO_PAST = "The queue has no history: it shows only now.";
const NOBODY = "No pod waits for GPUs.";

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
    const { state, data } = this.question.want(PATH, isShown ? EVERY_SECONDS : COUNT_SECONDS);
    this.isMissing = !isShown && state === "missing"; // the view asks again
    return state === "ready" ? (data.pods ?? 0) : undefined;
  }

  show(criteria) {
    const { state, data, message } = pastTime() ? past() : this.question.want(PATH, EVERY_SECONDS);
    const groups = (data?.groups ?? []).filter((group) => isMatch(group, criteria));
    this.current = { data, groups, key: JSON.stringify([criteria.q, criteria.ns]) };
    const none = data?.groups?.length
      ? "No waiting pod matches the filter."
      : hiddenText(data) || NOBODY;
    this.message.hidden = groups.length > 0;
    setText(this.message, state === "ready" ? none : noneText(state, message, MISSING));
    this.draw();
  }

  // Draws only new data, so that opened lines stay open.
  draw() {
    const { data, groups, key } = this.current;
    if (data === this.drawn && key === this.drawnKey) return;
    const opened = new Set(
      [...this.list.querySelectorAll("details[open]")].map((each) => each.dataset.key),
    );
    this.drawn = data;
    this.drawnKey = key;
    place(this.sums, data ? sumsOf(data) : []);
    place(
      this.list,
      groups.slice(0, this.limit).map((group) => lineOf(group, data, opened)),
    );
    this.more.hidden = groups.length <= this.limit;
    setText(this.more, `Show more: ${plural(groups.length - this.limit, "line")} left`);
    this.freeSection.hidden = !data?.free?.length;
    this.showFree(this.free.order ?? "-resource");
    const omitted = data?.omitted_pods
      ? [`${plural(data.omitted_pods, "pod")} with other reasons are not listed`]
      : [];
    setText(this.notes, [...(data?.notes ?? []).map(plain), ...omitted].join(" \u00b7 "));
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
      number(
        "closed",
        "Free on closed nodes",
        "On nodes that are cordoned or not ready. Not in the other columns",
      ),
    ];
    const rows = this.drawn?.free ?? [];
    if (!rows.some((row) => row.closed)) columns.pop();
    this.free.show(rows, columns, order, (row) => `${row.resource}\n${row.model ?? ""}`);
  }
}

/** @returns {import("./ask.js").Answer} */
function past() {
  return { state: "missing", message: NO_PAST };
}

function hiddenText(data) {
  return data?.hidden_pods
    ? `${plural(data.hidden_pods, "pod")} wait in namespaces that you may not see.`
    : "";
}

function isMatch(group, { q, ns }) {
  const words = wordsOf(q);
  const text = (pod) =>
    `${nameOf(pod)}\n${ownerOf(pod) ?? ""}\n${group.needs.map((need) => need.resource).join("\n")}`.toLowerCase();
  return group.examples.some(
    (pod) => (!ns || pod.namespace === ns) && words.every((word) => text(pod).includes(word)),
  );
}

function sumsOf(data) {
  const facts = [
    fact("Waiting", plural(data.pods ?? 0, "pod")),
    fact("GPUs they need", parts(data.gpus ?? 0)),
  ];
  const [oldest] = data.groups ?? [];
  if (oldest) facts.push(fact("Longest", duration(data.taken_at - oldest.since)));
  if (data.hidden_pods)
    facts.push(
      fact(
        "In other namespaces",
        `${plural(data.hidden_pods, "pod")}, ${parts(data.hidden_gpus ?? 0)} GPUs`,
      ),
    );
  return facts;
}

function lineOf(group, data, opened) {
  const [cause, ...others] = group.reasons;
  const key = JSON.stringify([cause.key, group.examples[0], group.needs]);
  const title = TITLES[cause.key] ?? plain(cause.key);
  const more = group.pods - (group.examples[0].pods ?? 1);
  const names =
    more > 0
      ? `${nameOf(group.examples[0])} and ${plural(more, "pod")} more`
      : nameOf(group.examples[0]);
  const gain = `${parts(group.gpus)} ${group.gpus === 1 ? "GPU" : "GPUs"}, ${duration(data.taken_at - group.since)}`;
  const head = h(
    "summary",
    {},
    h(
      "span",
      { class: `saving-kind queue-kind queue-${cause.key === "fits" ? "fits" : "waits"}` },
      title,
    ),
    h("bdi", { class: "saving-names" }, names),
    h("span", { class: "saving-gain" }, gain),
    h("span", { class: "queue-cause" }, plain(cause.says)),
    group.message
      ? h(
          "span",
          { class: "queue-cause queue-message" },
          `${speakerOf(group)}: ${plain(group.message)}`,
        )
      : undefined,
  );
  const body = [
    h("p", { class: "queue-do" }, plain(cause.do ?? "")),
    otherReasons(others),
    unblocking(group, data),
    factsOf(group),
    podsOf(group, data),
  ];
  const details = h("details", { "data-key": key, open: opened.has(key) }, head, ...body);
  return h("li", {}, details);
}

function otherReasons(reasons) {
  if (!reasons.length) return undefined;
  const items = reasons.map((reason) =>
    h("li", {}, [plain(reason.says), plain(reason.do ?? "")].filter(Boolean).join(" ")),
  );
  return h("section", {}, h("h2", {}, "Other nodes"), h("ul", { class: "marks" }, ...items));
}

function unblocking(group, data) {
  if (!group.unblock?.length) return undefined;
  const items = group.unblock.map((option) => {
    const cost =
      option.cost_per_hour === undefined ? "" : `, ${perHour(option.cost_per_hour, data.currency)}`;
    const pods = option.pods.flatMap((pod, i) => [i ? "; " : "", ...idlePod(pod, data)]);
    return h("li", {}, h("span", {}, h("bdi", {}, plain(option.node)), ": ", ...pods, cost));
  });
  return h(
    "section",
    {},
    h("h2", {}, "Idle pods: it would fit if all of a line ended"),
    h("ul", { class: "marks" }, ...items),
  );
}

function idlePod(pod, data) {
  const owner = ownerOf(pod);
  const idle = `${owner ? ` (${owner})` : ""}, ${parts(pod.gpus ?? 0)} ${pod.gpus === 1 ? "GPU" : "GPUs"} idle for ${duration(data.taken_at - pod.idle_since)}`;
  if (pod.hidden) return [`a pod that you may not see${idle}`];
  return [
    h("a", { href: podHash(pod.namespace ?? "", pod.pod ?? "", "") }, h("bdi", {}, nameOf(pod))),
    idle,
  ];
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
  const table = new Table(
    "Waiting pods of this line",
    (order) => {
      const [rows, columns, , keyOf] = table.shown;
      table.show(rows, columns, order, keyOf);
    },
    false,
  );
  const columns = [
    { name: "pod", title: "Pod", value: nameOf },
    { name: "owner", title: "Owner", value: ownerOf },
    { name: "pods", title: "Pods", value: (pod) => pod.pods ?? 1, write: count },
    {
      name: "since",
      title: "Waits for",
      value: (pod) => data.taken_at - pod.since,
      write: duration,
    },
  ];
  table.show(group.examples, columns, "since", nameOf);
  return table.element;
}

// The name of a pod, or kind and name of the object that stands for pods.
function nameOf({ namespace, pod, kind }) {
  const name = [namespace, pod].filter(Boolean).join("/");
  return plain(kind ? `${kind} ${name}` : name);
}

function ownerOf({ owner }) {
  return owner ? plain(`${owner.kind}/${owner.name}`) : undefined;
}
