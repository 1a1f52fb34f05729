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
import { h, place, plain, setAttribute, setText } from "./dom.js";
import { duration, memory, money, parts, percent, perHour, plural } from "./format.js";
import { ownMemory, ownUtilization } from "./history.js";
import { waitText } from "./rows.js";
import { Table } from "./table.js";
import { Mean, Sum, Waste } from "./totals.js";

const KUBE_GROUPS = { pod: "Pods", owner: "Owners", namespace: "Namespaces" };
const JOB = "job"; // owners whose pods work together, with their slowest GPU
const JOBS_SECONDS = 10;
const HOLDER_SOURCES = new Set(["usage", "kubelet"]); // without them, holders are not known
const PLAIN_GROUPS = { pod: "Users and jobs" };
const GPU_USE =
  "Current use of the whole GPU or MIG instance, even if it is shared. For several GPUs, the mean, weighted by the share held. The tab Cost shows the use of what a pod holds.";

// Returns the ways to group holders, with their titles. `isKube`: holders are pods.
export function groupsFor(isKube) {
  return isKube ? KUBE_GROUPS : PLAIN_GROUPS;
}

export class Pods {
  // `context` has now() and prices(). `onOrder` is called with the new order of the table.
  constructor(context, onOrder, onAnswer) {
    this.context = context;
    this.jobs = new Question(onAnswer);
    this.ways = h("nav", { class: "tabs", "aria-label": "Holders by" });
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
    const groups = hasJobs
      ? { pod: KUBE_GROUPS.pod, [JOB]: "Jobs", ...KUBE_GROUPS }
      : groupsFor(isKube);
    const by = criteria.by in groups ? criteria.by : "pod";
    if (this.ways.children.length !== Object.keys(groups).length) {
      place(
        this.ways,
        Object.values(groups).map((title) => h("a", {}, title)),
      );
    }
    Object.keys(groups).forEach((way, i) => {
      const link = this.ways.children[i];
      setAttribute(
        link,
        "href",
        writeHash({
          view: "pods",
          by: way === "pod" ? "" : way,
          q: criteria.q,
          cluster: criteria.cluster,
          ns: criteria.ns,
        }),
      );
      setAttribute(link, "aria-current", way === by ? "page" : undefined);
    });
    const words = wordsOf(criteria.q);
    const isFromServer = picture.paged && by === "namespace"; // then not all GPUs are listed
    let all = isFromServer
      ? ofCluster(picture.namespaces ?? [], criteria.cluster).map(namespaceRow)
      : holderRows(ofCluster(devices, criteria.cluster), by);
    const jobs =
      by === JOB && !pastTime()
        ? this.jobs.want("api/v1/jobs", JOBS_SECONDS).data?.jobs
        : undefined;
    if (by === JOB) all = jobRows(all, jobs);
    const rows = all.filter(
      (row) =>
        (!criteria.ns || row.namespace === criteria.ns) &&
        words.every((word) => row.text.includes(word)),
    );
    this.message.hidden = rows.length > 0;
    this.copy.hidden = this.table.element.hidden = !rows.length;
    const isFiltered = criteria.q || criteria.cluster || criteria.ns;
    const busy = devices.filter((device) => device.mayWork && !device.gone).length;
    const none =
      by === JOB
        ? "No Job, JobSet, training job, RayCluster or StatefulSet holds a GPU."
        : busy
          ? busyText(busy, isKube, picture)
          : isKube
            ? "No pod holds a GPU."
            : "Nobody uses a GPU.";
    setText(
      this.message,
      isFiltered ? "Nothing matches the filter. Press Escape to clear it." : none,
    );
    setText(
      this.about,
      rows.length
        ? aboutText(
            rows,
            isKube ? (by === JOB ? "job" : by) : "holder",
            this.context.prices(),
            isFiltered ? 0 : busy,
          )
        : "",
    );
    if (rows.length)
      this.table.show(
        rows,
        holderColumns(by, rows, this.context, isKube),
        criteria.order || "gpus",
        (row) => row.key,
      );
  }
}

// Returns a row for each pod, owner or namespace. A holder that is not a pod, such as a user, is its own group.
export function holderRows(devices, by) {
  const rows = new Map();
  for (const device of devices) {
    for (const holder of device.holders) {
      const name = nameOf(holder, by);
      const key = `${holder.cluster}/${holder.namespace}/${name}`;
      let row = rows.get(key);
      if (!row) rows.set(key, (row = new HolderRow(key, name, holder, by)));
      row.add(device, holder);
    }
  }
  return [...rows.values()];
}

// Returns the rows of jobs: the owners that the server lists, with their slowest GPU. Without the list, all owners.
function jobRows(rows, jobs) {
  if (!jobs) return rows.filter((row) => row.isOwner);
  const keyOf = (cluster, namespace, name) => `${cluster}/${namespace}/${name}`;
  const known = new Map(
    jobs.map((job) => [keyOf(job.cluster ?? "", job.namespace, `${job.kind}/${job.name}`), job]),
  );
  const found = rows.filter((row) => known.has(keyOf(row.cluster, row.namespace, row.name)));
  for (const row of found)
    row.slowest = known.get(keyOf(row.cluster, row.namespace, row.name)).slowest;
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
  const row = new HolderRow(
    `${cluster}/${namespace}`,
    hidden ? "other namespaces" : namespace,
    { namespace, cluster },
    "namespace",
  );
  row.cost.add(cost);
  row.waste.add(waste?.cost_per_hour);
  return Object.assign(row, { gpus, idleGpus: idle, isKnown: true });
}

function nameOf(holder, by) {
  if (by === "namespace") return holder.namespace || holder.name;
  return (by !== "pod" && holder.owner) || holder.pod || holder.name;
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
    this.text = [name, holder.cluster, holder.namespace, holder.owner, holder.pod]
      .join("\n")
      .toLowerCase();
    this.nodes = new Set();
    this.pods = new Set();
    this.gpus = this.idleGpus = 0;
    this.busy = new Mean();
    this.used = new Sum();
    this.cost = new Sum();
    this.waste = new Waste();
    this.waited = new Sum();
    this.isKnown = false; // whether the use of any of its GPUs is known
    this.idleSince = 0;
  }

  add(device, holder) {
    this.nodes.add(device.node);
    this.pods.add(holder.name);
    this.gpus += holder.amount;
    if (holder.use === "idle") this.idleGpus += holder.amount;
    this.isKnown ||= holder.use !== "unknown";
    if (!device.old) this.busy.add(ownUtilization(device, holder), holder.amount);
    if (!device.old) this.used.add(ownMemory(device, holder));
    this.waited.add(holder.waited);
    const [longest] = holder.waitsFor;
    if (longest && !(this.waitsFor?.ratio > longest.ratio)) this.waitsFor = longest;
    this.cost.add(holder.cost);
    this.waste.add(holder.waste);
    this.idleSince =
      holder.use === "idle" && holder.idleSince
        ? Math.max(this.idleSince, holder.idleSince)
        : Infinity;
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
  const [what, who] = isKube
    ? ["no pod holds", "No process of a pod"]
    : ["it is not known who uses", "No process"];
  const problem = alerts.find((alert) =>
    alert.sources?.some((source) => HOLDER_SOURCES.has(source)),
  )?.text;
  const [are, them] = busy === 1 ? ["is", "it"] : ["are", "them"];
  return `${plural(busy, "GPU")} ${are} busy, but ${what} ${them}. ${problem ? plain(problem) : `${who} was found on ${them}.`}`;
}

function aboutText(rows, by, currency, busy) {
  const total = (value) => rows.reduce((sum, row) => sum + value(row), 0);
  const idle = total((row) => row.idleGpus);
  const others = by === "pod" ? rows.filter((row) => !row.namespace).length : 0; // users and jobs outside Kubernetes
  const texts = [
    plural(rows.length - others, by),
    others && plural(others, "user or job", "users and jobs"),
    `${parts(total((row) => row.gpus))} GPUs`,
  ];
  if (idle) texts.push(`${parts(idle)} idle`);
  if (busy) texts.push(`${plural(busy, "more GPU")} busy, holder unknown`);
  const isPartial = rows.some((row) => row.cost.known < row.cost.added);
  if (rows.some((row) => row.cost.known))
    texts.push(
      `${isPartial ? "\u2265\u202f" : ""}${perHour(
        total((row) => row.cost.total),
        currency,
      )}`,
    );
  return texts.filter(Boolean).join(" \u00b7 ");
}

export function holderColumns(by, rows, { now, prices }, isKube) {
  const mean = (sum) => (sum.known ? sum.total / sum.known : undefined);
  const total = (sum) => (sum.known ? sum.total : undefined);
  const isSome = (value) => value > 0;
  const hourly = (price) => money(price, prices());
  const idleFor = (row) =>
    Number.isFinite(row.idleSince) && row.idleSince ? now() - row.idleSince : undefined;
  const columns = [
    {
      name: "name",
      title: isKube ? (by === JOB ? "Job" : KUBE_GROUPS[by].slice(0, -1)) : "User or job",
      value: (row) => row.name,
      link: (row) => row.link,
    },
    { name: "cluster", title: "Cluster", value: (row) => row.cluster },
    { name: "namespace", title: "Namespace", value: (row) => row.namespace },
    { name: "owner", title: "Owner", value: (row) => row.owner, link: (row) => row.ownerLink },
    {
      name: "slowest",
      title: "Slowest GPU",
      isLong: true,
      value: (row) => slowText(row.slowest),
      isWarm: Boolean,
    },
    {
      name: "node",
      title: "Node",
      value: (row) => (row.nodes.size > 1 ? plural(row.nodes.size, "node") : [...row.nodes][0]),
      link: (row) => (row.nodes.size === 1 ? nodeHash([...row.nodes][0]) : undefined),
    },
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
      isWide: true,
      title: "Memory",
      value: (row) => total(row.used),
      write: memory,
    },
    {
      name: "idle",
      isWide: true,
      title: "Idle GPUs",
      value: (row) => (row.isKnown === false ? undefined : row.idleGpus),
      write: parts,
      isWarm: isSome,
    },
    { name: "idle_for", title: "Idle for", value: idleFor, write: duration, isWarm: isSome },
    { name: "cost", title: "Cost/h", value: (row) => total(row.cost), write: hourly },
    {
      name: "wasted",
      title: "Wasted/h",
      value: (row) => row.waste.total,
      write: hourly,
      isWarm: isSome,
    },
    {
      name: "idle_cost",
      isDetail: true,
      title: "Idle cost/h",
      value: (row) => row.waste.rounded(prices()).idle,
      write: hourly,
    },
    {
      name: "underused_cost",
      isDetail: true,
      title: "Under-used cost/h",
      value: (row) => row.waste.rounded(prices()).underused,
      write: hourly,
    },
    {
      name: "waiting",
      title: "Waiting",
      isLong: true,
      value: (row) => mean(row.waited),
      write: (ratio, row) => waitText(ratio, row.waited.known === 1 ? row.waitsFor : undefined),
    },
  ];
  const unused = {
    pod: ["pods"],
    job: ["owner"],
    owner: ["owner"],
    namespace: ["owner", "namespace", "idle_for"],
  }[by];
  return columns.filter(({ name, value }, i) => {
    if (i === 0) return true;
    return (
      !unused.includes(name) && rows.some((row) => value(row) !== undefined && value(row) !== "")
    );
  });
}
