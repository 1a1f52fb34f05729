// The filters and the sort order, stored in the address after #, so that a link shows the same
// page.

import { textOf } from "./devices.js";
import { plain } from "./dom.js";

export const STATES = [
  ["", "Any state"],
  ["held", "Allocated"],
  ["used", "Used"],
  ["idle", "Idle"],
  ["unknown", "Use unknown"],
  ["free", "Free"],
  ["unheld", "Holder unknown"],
  ["broken", "Broken"],
  ["old", "Old"],
];
export const SORTS = [
  ["", "By node"],
  ["broken", "Broken first"],
  ["idle", "Longest idle"],
  ["wasted", "Most wasted"],
  ["utilization", "Most utilised"],
  ["memory", "Fullest memory"],
];
export const SHOWS = [
  ["", "Tiles or map"],
  ["tiles", "Tiles"],
  ["map", "Map"],
];
const RANGE_HOURS = { "1h": 1, "6h": 6, "24h": 24, "7d": 168, "30d": 720 };
export const RANGES = Object.keys(RANGE_HOURS);
export const NAMES = /** @type {const} */ ([
  "q",
  "cluster",
  "ns",
  "node",
  "model",
  "state",
  "sort",
  "show",
]);
const FILTERS = ["q", "cluster", "ns", "node", "model", "state"];
const OTHERS = /** @type {const} */ ([
  "view",
  "pod",
  "job",
  "gpu",
  "by",
  "order",
  "range",
  "from",
  "to",
  "cost",
  "page",
]);
const PAGE_SIZE = 20; // nodes per page, if the server does not list all nodes
// Choices that Prometheus cannot compute.
const UNPAGED = { state: ["unknown", "unheld", "old"], sort: ["wasted"] };

// Views of version 0.2.
const EARLIER = {
  namespaces: { view: "pods", by: "namespace" },
  waste: { view: "cost", order: "wasted" },
};

export const VIEWS = ["pods", "nodes", "cost", "savings", "queue", "events"];
const WAYS = {
  pods: ["pod", "job", "owner", "namespace"],
  cost: ["pod", "owner", "namespace", "model"],
  savings: ["stop", "shrink", "share", "pack"],
  events: ["problems", "pods", "idle"],
};
const OTHER_WAYS = ["pod", "owner", "namespace"];
// Values of the address that are one of a list. The values of `by` and `range` depend on the view.
const CHOICES = {
  view: () => VIEWS,
  state: () => STATES.map(([name]) => name),
  sort: () => SORTS.map(([name]) => name),
  show: () => SHOWS.map(([name]) => name),
  by: ({ view }) => WAYS[view] ?? OTHER_WAYS,
  range: rangesOf,
};

function rangesOf({ view, pod }) {
  const ranges = [...RANGES];
  if (view === "cost") ranges.push("month");
  if (pod) ranges.push("whole run");
  return ranges;
}

let unknown = []; // names in the address that are not known
let time = ""; // the past Unix time in the address; empty for now. All links of the page keep it.

export function pastTime() {
  return time;
}

/**
 * All that an address can select; an empty text is the default.
 * @typedef {Record<(typeof NAMES)[number] | (typeof OTHERS)[number], string>} Criteria
 */

export function readHash(hash) {
  const query = new URLSearchParams(hash.replace(/^#/, ""));
  const renamed = EARLIER[query.get("view")] ?? {};
  for (const [name, value] of Object.entries(renamed)) query.set(name, value);

  time = query.get("at") ?? "";
  const names = /** @type {string[]} */ ([...OTHERS, ...NAMES]);
  unknown = [...new Set(query.keys())].filter((name) => name !== "at" && !names.includes(name));
  const criteria = Object.fromEntries(names.map((name) => [name, query.get(name) ?? ""]));
  return /** @type {Criteria} */ (criteria);
}

// Says which parts of the address select nothing. Empty if there are none.
export function wrongText(criteria) {
  const wrong = unknown.map((name) => `"${plain(name)}" is not known`);
  for (const [name, choicesOf] of Object.entries(CHOICES)) {
    const value = criteria[name];
    const choices = choicesOf(criteria).filter(Boolean);
    const isLabel = name === "by" && value.startsWith("label:");
    if (value && !isLabel && !choices.includes(value))
      wrong.push(`${name}=${plain(value)} is not one of ${choices.join(", ")}`);
  }
  if (criteria.job && jobOf(criteria.job).name === "")
    wrong.push(`job=${plain(criteria.job)} is not KIND/NAMESPACE/NAME`);
  return wrong.length ? `A part of this link is ignored: ${wrong.join("; ")}.` : "";
}

/** @param {Partial<Criteria>} criteria */
export function writeHash(criteria, at = time) {
  const query = new URLSearchParams();
  if (at) query.set("at", at);
  for (const name of [...OTHERS, ...NAMES]) {
    if (criteria[name]) query.set(name, criteria[name]);
  }
  return `#${query.toString().replaceAll("%2F", "/")}`;
}

// Returns the choices of a filter. `isPaged`: the server lists only nodes with a GPU that matches
// the filters.
export function choicesOf(name, isPaged) {
  const all = { state: STATES, sort: SORTS }[name];
  return isPaged ? all.filter(([value]) => !UNPAGED[name].includes(value)) : all;
}

// Returns the path of the view at the time of the address.
export function viewPath() {
  return time ? `api/v1/view?at=${encodeURIComponent(time)}` : "api/v1/view";
}

// Returns the path of the view with the nodes that the page shows, if the server does not list all
// of them.
export function pagePath(criteria) {
  if (["cost", "savings", "queue", "events"].includes(criteria.view)) return viewPath();

  const selected = { at: time, ...selectionOf(criteria) };
  const query = new URLSearchParams(Object.entries(selected).filter(([, value]) => value));
  return `api/v1/view?${query}`;
}

// Returns the parameters that select the nodes. A GPU, a pod and a job fit on the first page.
function selectionOf(criteria) {
  const { pod, job, cluster } = criteria;
  const [gpu] = criteria.gpu.split("/"); // without the MIG instance
  const selected = { gpu };
  if (pod) [selected.ns, selected.pod] = pod.split("/");
  if (job) {
    const { kind, namespace, name } = jobOf(job);
    selected.ns = namespace;
    selected.owner = `${kind}/${name}`;
  }
  if (pod || job) return { ...selected, cluster, page: "1" };
  if (gpu) return { ...selected, page: "1" };

  for (const name of [...FILTERS, "sort"]) {
    const isUnpaged = UNPAGED[name]?.includes(criteria[name]);
    if (!isUnpaged) selected[name] = criteria[name];
  }
  return { ...selected, page: String(pageOf(criteria)) };
}

export function pageOf({ page }) {
  return Math.max(1, Number.parseInt(page, 10) || 1);
}

// Returns the links to the previous and the next page; undefined if there is none.
export function neighbours(criteria, found) {
  const page = pageOf(criteria);
  const pages = Math.ceil(found / PAGE_SIZE);
  const link = (number) => {
    if (number < 1 || number > pages) return undefined;
    const isFirst = number === 1;
    return writeHash({ ...criteria, page: isFirst ? "" : String(number) });
  };
  return [link(page - 1), link(page + 1)];
}

export function podHash(namespace, pod, cluster, range) {
  return writeHash({ pod: `${namespace}/${pod}`, cluster, range });
}

// Returns the link to the page of a holder's owner.
export function jobHash({ namespace, owner, cluster }, range) {
  const slash = owner.indexOf("/");
  const kind = owner.slice(0, slash);
  const name = owner.slice(slash + 1);
  return writeHash({ job: `${kind}/${namespace}/${name}`, cluster, range });
}

// Splits KIND/NAMESPACE/NAME. The name is empty if the text is something else.
export function jobOf(text) {
  const [kind, namespace = "", ...name] = text.split("/");
  return { kind, namespace, name: name.join("/") };
}

// Returns the link of a holder: the page of a pod, or the GPUs of a user or job.
export function holderHash({ namespace, pod, cluster, name }) {
  return pod ? podHash(namespace, pod, cluster) : writeHash({ cluster, q: name });
}

export function gpuHash(uuid, range) {
  return writeHash({ gpu: uuid, range });
}

export function nodeHash(name, range) {
  return writeHash({ view: "nodes", node: name, range });
}

// Returns the shortest range that contains a time some seconds ago, and that still contains it for
// a while.
export function rangeFor(seconds) {
  const contains = (range) => seconds < 0.9 * RANGE_HOURS[range] * 3600;
  return RANGES.find(contains) ?? RANGES.at(-1);
}

// Returns the default range of charts: the shortest one that contains the time in the address.
// `now`: server's clock.
export function pastRange(now) {
  return time ? rangeFor(now - Number(time)) : RANGES[0];
}

// Returns a text that identifies the current view, without its filters.
export function placeOf({ view, pod, job, gpu, node, cluster }) {
  const place = { view, pod, job, gpu };
  // In other views, the node and the cluster are filters.
  if (view === "nodes") place.node = node;
  if (pod || job) place.cluster = cluster;
  return writeHash(place);
}

// True for the list of GPUs, false for the other views.
export function isList(criteria) {
  return !criteria.pod && !jobOf(criteria.job).name && !criteria.gpu && !criteria.view;
}

export function isFiltered(criteria) {
  return FILTERS.some((name) => criteria[name]);
}

export function without(criteria) {
  return { ...criteria, ...Object.fromEntries(FILTERS.map((name) => [name, ""])) };
}

export function wordsOf(text) {
  return text.toLowerCase().split(/\s+/).filter(Boolean);
}

// Returns the devices of a cluster. If there is only one cluster, devices have no cluster name.
export function ofCluster(devices, cluster) {
  const isSingle = !devices.some((device) => device.cluster);
  if (!cluster || isSingle) return devices;
  return devices.filter((device) => device.cluster === cluster);
}

export function matching(devices, criteria) {
  const words = wordsOf(criteria.q);
  const { ns, node, model } = criteria;
  const state = STATES.some(([name]) => name === criteria.state) ? criteria.state : "";
  return ofCluster(devices, criteria.cluster).filter((device) => {
    if (node && device.node !== node) return false;
    if (model && device.model !== model) return false;
    if (state && !device[state]) return false;
    if (ns && !device.holders.some((holder) => holder.namespace === ns)) return false;
    return words.every((word) => textOf(device).includes(word));
  });
}

// Whether a row of a table is of the chosen cluster and namespace.
export function isOfScope(row, { cluster, ns }) {
  if (cluster && row.cluster !== cluster) return false;
  return !ns || row.namespace === ns;
}

// Sorts stably, with unknown values last.
export function sorted(devices, sort) {
  const rank = RANKS[sort];
  if (!rank) return devices;
  return devices
    .map((device) => [rank(device), device])
    .sort(([a], [b]) => b - a)
    .map(([, device]) => device);
}

const RANKS = {
  broken: (device) => SEVERITY_RANKS[device.severity] ?? 0,
  idle: idleRank,
  wasted: (device) => device.wasted ?? -1,
  utilization: (device) => device.utilization ?? -1,
  memory: (device) => (device.memoryUsed ?? -1) / (device.memoryTotal || 1),
};
const SEVERITY_RANKS = { broken: 2, warning: 1 };

// The longest idle GPU first, then those that are idle for an unknown time, then all others.
function idleRank(device) {
  if (!device.isIdle) return -1e12;
  return device.idleSince === undefined ? -1e11 : -device.idleSince;
}

export function groupedByNode(devices) {
  return Map.groupBy(devices, (device) => device.node);
}

// Returns the devices of a pod. Without `cluster`, prefers the cluster that has no name.
export function podDevices(devices, namespace, pod, cluster) {
  const isOwn = (holder) => holder.pod === pod && holder.namespace === namespace;
  const held = ofCluster(devices, cluster).filter((device) => device.holders.some(isOwn));
  const unnamed = held.filter((device) => !device.cluster);
  return unnamed.length ? unnamed : held;
}
