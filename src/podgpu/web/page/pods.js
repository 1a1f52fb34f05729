// Shows the current holders of GPUs, as a table by pod, owner or namespace.

import { copyButton } from "./actions.js";
import { Question } from "./ask.js";
import {
  holderHash,
  jobHash,
  nodeHash,
  ofCluster,
  pastTime,
  wordsOf,
  writeHash,
} from "./criteria.js";
import { h, place, plain, setTab, setText, tabs } from "./dom.js";
import {
  bounded,
  dotted,
  duration,
  memory,
  money,
  parts,
  percent,
  perHour,
  plural,
} from "./format.js";
import { ownMemory, ownUtilization } from "./history.js";
import { waitText } from "./rows.js";
import { filledColumns, Table, wasteColumns } from "./table.js";
import { Mean, Sum, sumOf, Waste } from "./totals.js";

const KUBE_GROUPS = { pod: "Pods", owner: "Owners", namespace: "Namespaces" };
const JOB = "job"; // owners whose pods work together, with their slowest GPU
const JOBS_SECONDS = 10;
const HOLDER_SOURCES = new Set(["usage", "kubelet"]); // without them, holders are not known
const PLAIN_GROUPS = { pod: "Users and jobs" };
const JOB_GROUPS = { pod: "Pods", job: "Jobs", owner: "Owners", namespace: "Namespaces" };
const NO_MATCH = "Nothing matches the filter. Press Escape to clear it.";
const NO_JOB = "No Job, JobSet, training job, RayCluster or StatefulSet holds a GPU.";
const GPU_USE = [
  "Current use of the whole GPU or MIG instance, even if it is shared.",
  "For several GPUs, the mean, weighted by the share held.",
  "The tab Cost shows the use of what a pod holds.",
].join(" ");
// Columns that a way to group does not need.
const LEFT_OUT = {
  pod: ["pods"],
  job: ["owner"],
  owner: ["owner"],
  namespace: ["owner", "namespace", "idle_for"],
};

// Returns the ways to group holders, with their titles. `isKube`: holders are pods.
export function groupsFor(isKube) {
  return isKube ? KUBE_GROUPS : PLAIN_GROUPS;
}

export class Pods {
  // `context` has now() and prices(). `onOrder` is called with the new order of the table.
  constructor(context, onOrder, onAnswer) {
    this.context = context;
    this.jobs = new Question(onAnswer);
    this.ways = tabs("Holders by");
    this.about = h("p", { class: "about" });
    this.message = h("p", { class: "message" });
    this.table = new Table("Pods", onOrder);
    this.copy = copyButton("Copy", () => this.table.asText());
    this.element = h(
      "div",
      { class: "pods" },
      h("div", { class: "table-head" }, this.ways, this.about, this.copy),
      this.message,
      this.table.element,
    );
  }

  leave() {
    this.jobs.forget();
  }

  show(devices, criteria, isKube, picture) {
    const hasJobs = isKube && picture.scope === "cluster" && !picture.paged;
    const groups = hasJobs ? JOB_GROUPS : groupsFor(isKube);
    const by = criteria.by in groups ? criteria.by : "pod";
    this.linkWays(groups, by, criteria);

    const words = wordsOf(criteria.q);
    const isMatch = (row) => {
      if (criteria.ns && row.namespace !== criteria.ns) return false;
      return words.every((word) => row.text.includes(word));
    };
    const rows = this.rowsBy(by, devices, criteria, picture).filter(isMatch);
    const busy = devices.filter((device) => device.mayWork && !device.gone).length;
    const isFiltered = criteria.q || criteria.cluster || criteria.ns;
    const isEmpty = !rows.length;
    this.message.hidden = !isEmpty;
    this.copy.hidden = isEmpty;
    this.table.element.hidden = isEmpty;
    if (isEmpty) {
      setText(this.message, isFiltered ? NO_MATCH : noneText(by, busy, isKube, picture));
      setText(this.about, "");
      return;
    }
    const shownBusy = isFiltered ? 0 : busy;
    setText(this.about, aboutText(rows, isKube ? by : "holder", this.context.prices(), shownBusy));
    const columns = holderColumns(by, rows, this.context, isKube);
    this.table.show(rows, columns, criteria.order || "gpus", (row) => row.key);
  }

  linkWays(groups, by, { q, cluster, ns }) {
    const ways = Object.keys(groups);
    if (this.ways.children.length !== ways.length) {
      const links = Object.values(groups).map((title) => h("a", {}, title));
      place(this.ways, links);
    }
    ways.forEach((way, i) => {
      const isDefault = way === "pod";
      const href = writeHash({ view: "pods", by: isDefault ? "" : way, q, cluster, ns });
      setTab(this.ways.children[i], href, way === by);
    });
  }

  rowsBy(by, devices, { cluster }, picture) {
    // If the server does not list all GPUs, it adds them up by namespace.
    if (picture.paged && by === "namespace") {
      return ofCluster(picture.namespaces ?? [], cluster).map(namespaceRow);
    }
    const rows = holderRows(ofCluster(devices, cluster), by);
    if (by !== JOB) return rows;
    // The slowest GPU is known only for now.
    if (pastTime()) return jobRows(rows, undefined);
    const { data } = this.jobs.want("api/v1/jobs", JOBS_SECONDS);
    return jobRows(rows, data?.jobs);
  }
}

// Returns a row for each pod, owner or namespace. A holder that is not a pod, such as a user, is
// its own group.
export function holderRows(devices, by) {
  const rows = new Map();
  for (const device of devices) {
    for (const holder of device.holders) {
      const name = nameOf(holder, by);
      const key = `${holder.cluster}/${holder.namespace}/${name}`;
      if (!rows.has(key)) rows.set(key, new HolderRow(key, name, holder, by));
      rows.get(key).add(device, holder);
    }
  }
  return [...rows.values()];
}

// Returns the rows of jobs: the owners that the server lists, with their slowest GPU. Without the
// list, all owners.
function jobRows(rows, jobs) {
  if (!jobs) return rows.filter((row) => row.isOwner);
  const listed = new Map();
  for (const job of jobs) {
    const { cluster = "", namespace, kind, name } = job;
    listed.set(`${cluster}/${namespace}/${kind}/${name}`, job);
  }
  const found = rows.filter((row) => listed.has(row.key));
  for (const row of found) row.slowest = listed.get(row.key).slowest;
  return found;
}

function namespaceRow({
  namespace,
  hidden = false,
  cluster = "",
  allocated_gpus: gpus,
  idle_gpus: idle,
  cost_per_hour: cost,
  waste,
}) {
  const name = hidden ? "other namespaces" : namespace;
  const key = `${cluster}/${namespace}`;
  const row = new HolderRow(key, name, { namespace, cluster }, "namespace");
  row.gpus = gpus;
  row.idleGpus = idle;
  row.isKnown = true;
  row.cost.add(cost);
  row.waste.add(waste?.cost_per_hour);
  return row;
}

function nameOf(holder, by) {
  const own = holder.pod || holder.name;
  if (by === "namespace") return holder.namespace || holder.name;
  if (by === "pod") return own;
  return holder.owner || own;
}

class HolderRow {
  constructor(key, name, holder, by) {
    this.key = key;
    this.name = name;
    this.namespace = holder.namespace;
    this.cluster = holder.cluster;
    this.owner = by === "pod" ? holder.owner : "";
    this.isOwner = Boolean(holder.owner);
    this.ownerLink = holder.owner && holder.pod ? jobHash(holder) : undefined;
    this.link = linkOf(holder, by);
    const texts = [name, holder.cluster, holder.namespace, holder.owner, holder.pod];
    this.text = texts.join("\n").toLowerCase();
    this.nodes = new Set();
    this.pods = new Set();
    this.gpus = 0;
    this.idleGpus = 0;
    this.busy = new Mean();
    this.used = new Sum();
    this.cost = new Sum();
    this.waste = new Waste();
    this.waited = new Sum();
    this.waitsFor = undefined; // the holder for which it waits longest
    this.isKnown = false; // whether the use of any of its GPUs is known
    // Since when all its GPUs are idle. Infinity if one is in use, or idle for an unknown time.
    this.idleSince = 0;
  }

  add(device, holder) {
    this.nodes.add(device.node);
    this.pods.add(holder.name);
    this.gpus += holder.amount;
    if (holder.use !== "unknown") this.isKnown = true;
    if (!device.old) {
      this.busy.add(ownUtilization(device, holder), holder.amount);
      this.used.add(ownMemory(device, holder));
    }
    this.addWait(holder);
    this.cost.add(holder.cost);
    this.waste.add(holder.waste);

    const isIdle = holder.use === "idle";
    const idleSince = (isIdle && holder.idleSince) || Infinity;
    if (isIdle) this.idleGpus += holder.amount;
    this.idleSince = Math.max(this.idleSince, idleSince);
  }

  addWait(holder) {
    this.waited.add(holder.waited);
    const [longest] = holder.waitsFor;
    if (!longest) return;
    const isShorter = this.waitsFor?.ratio > longest.ratio;
    if (!isShorter) this.waitsFor = longest;
  }
}

function linkOf(holder, by) {
  const { cluster, namespace: ns } = holder;
  if (by === "namespace") return ns ? writeHash({ cluster, ns }) : undefined;
  if (by !== "pod" && holder.owner && ns) return jobHash(holder);
  return holderHash(holder);
}

// Formats the slowest GPU of a job. Unknown if no GPU is slower.
function slowText(slowest) {
  if (!slowest) return undefined;
  const gpu = slowest.index === undefined ? "a GPU" : `GPU ${slowest.index}`;
  return `${gpu} of ${slowest.node}: ${slowest.explanation}.`;
}

// Says why GPUs are busy without a known holder: the problem of a source, or no process.
function busyText(busy, isKube, { alerts = [] }) {
  const verb = busy === 1 ? "is" : "are";
  const them = busy === 1 ? "it" : "them";
  const nobody = isKube ? "no pod holds" : "it is not known who uses";
  const text = `${plural(busy, "GPU")} ${verb} busy, but ${nobody} ${them}.`;

  const isOfHolders = (alert) => alert.sources?.some((source) => HOLDER_SOURCES.has(source));
  const problem = alerts.find(isOfHolders)?.text;
  if (problem) return `${text} ${plain(problem)}`;
  const process = isKube ? "No process of a pod" : "No process";
  return `${text} ${process} was found on ${them}.`;
}

function noneText(by, busy, isKube, picture) {
  if (by === JOB) return NO_JOB;
  if (busy) return busyText(busy, isKube, picture);
  return isKube ? "No pod holds a GPU." : "Nobody uses a GPU.";
}

function aboutText(rows, by, currency, busy) {
  const gpus = sumOf(rows.map((row) => row.gpus));
  const idle = sumOf(rows.map((row) => row.idleGpus));
  // Users and jobs outside Kubernetes.
  const others = by === "pod" ? rows.filter((row) => !row.namespace).length : 0;
  const texts = [
    plural(rows.length - others, by),
    others && plural(others, "user or job", "users and jobs"),
    `${parts(gpus)} GPUs`,
    idle && `${parts(idle)} idle`,
    busy && `${plural(busy, "more GPU")} busy, holder unknown`,
  ];
  const isPriced = rows.some((row) => row.cost.known);
  if (isPriced) {
    const cost = sumOf(rows.map((row) => row.cost.total));
    const isPartial = rows.some((row) => row.cost.known < row.cost.added);
    texts.push(bounded(perHour(cost, currency), isPartial));
  }
  return dotted(texts);
}

export function holderColumns(by, rows, { now, prices }, isKube) {
  const idleSeconds = ({ idleSince }) => {
    const isKnown = Number.isFinite(idleSince) && idleSince > 0;
    return isKnown ? now() - idleSince : undefined;
  };
  const columns = [
    ...nameColumns(by, isKube),
    { name: "pods", title: "Pods", value: (row) => row.pods.size || undefined, write: parts },
    { name: "gpus", title: "GPUs", value: (row) => row.gpus, write: parts },
    {
      name: "utilisation",
      title: "Use of the GPU",
      hint: GPU_USE,
      value: (row) => row.busy.value,
      write: percent,
    },
    {
      name: "memory",
      title: "Memory",
      value: (row) => row.used.value,
      write: memory,
      isWide: true,
    },
    {
      name: "idle",
      title: "Idle GPUs",
      value: (row) => (row.isKnown ? row.idleGpus : undefined),
      write: parts,
      isWarm: isSome,
      isWide: true,
    },
    { name: "idle_for", title: "Idle for", value: idleSeconds, write: duration, isWarm: isSome },
    ...costColumns(prices()),
    { name: "waiting", title: "Waiting", value: meanWait, write: waitingText, isLong: true },
  ];
  const leftOut = LEFT_OUT[by];
  const wanted = columns.filter(({ name }) => !leftOut.includes(name));
  return filledColumns(wanted, rows);
}

function isSome(value) {
  return value > 0;
}

function costColumns(currency) {
  const write = (cost) => money(cost, currency);
  const wasted = (row) => row.waste.total;
  const parts = wasteColumns((row) => row.waste, currency, { unit: "/h", write, isDetail: true });
  return [
    { name: "cost", title: "Cost/h", value: (row) => row.cost.value, write },
    { name: "wasted", title: "Wasted/h", value: wasted, write, isWarm: isSome },
    ...parts,
  ];
}

// Columns that say which pods a row is about, and where they run.
function nameColumns(by, isKube) {
  const title = isKube ? JOB_GROUPS[by].replace(/s$/, "") : "User or job";
  const known = (name) => (row) => row[name] || undefined;
  return [
    { name: "name", title, value: (row) => row.name, link: (row) => row.link },
    { name: "cluster", title: "Cluster", value: known("cluster") },
    { name: "namespace", title: "Namespace", value: known("namespace") },
    { name: "owner", title: "Owner", value: known("owner"), link: (row) => row.ownerLink },
    {
      name: "slowest",
      title: "Slowest GPU",
      value: (row) => slowText(row.slowest),
      isWarm: Boolean,
      isLong: true,
    },
    { name: "node", title: "Node", value: nodeText, link: nodeLink },
  ];
}

function nodeText({ nodes }) {
  if (nodes.size > 1) return plural(nodes.size, "node");
  const [only] = nodes;
  return only;
}

function nodeLink({ nodes }) {
  const [first, ...others] = nodes;
  const isOne = first !== undefined && !others.length;
  return isOne ? nodeHash(first) : undefined;
}

function meanWait({ waited }) {
  return waited.known ? waited.total / waited.known : undefined;
}

// The mean of several holders has no holder for which all of them wait.
function waitingText(ratio, { waited, waitsFor }) {
  return waitText(ratio, waited.known === 1 ? waitsFor : undefined);
}
