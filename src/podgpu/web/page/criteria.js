// The filters and the sort order, stored in the address after #, so that a link shows the same page.

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
export const RANGES = ["1h", "6h", "24h", "7d", "30d"];
const RANGE_HOURS = [1, 6, 24, 168, 720];
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
const UNPAGED = { state: ["unknown", "unheld", "old"], sort: ["wasted"] }; // choices that Prometheus cannot compute

const EARLIER = {
  namespaces: { view: "pods", by: "namespace" },
  waste: { view: "cost", order: "wasted" },
}; // views of version 0.2

export const VIEWS = ["pods", "nodes", "cost", "savings", "queue", "events"];
const WAYS = { events: ["problems", "pods", "idle"], savings: ["stop", "shrink", "share", "pack"] };
// Values of the address that are one of a list. The values of `by` and `range` depend on the view.
const CHOICES = {
  view: () => VIEWS,
  state: () => STATES.map(([name]) => name),
  sort: () => SORTS.map(([name]) => name),
  show: () => SHOWS.map(([name]) => name),
  by: ({ view }) =>
    WAYS[view] ?? [
      "pod",
      ...(view === "pods" ? ["job"] : []),
      "owner",
      "namespace",
      ...(view === "cost" ? ["model"] : []),
    ],
  range: ({ view, pod }) => [
    ...RANGES,
    ...(view === "cost" ? ["month"] : []),
    ...(pod ? ["whole run"] : []),
  ],
};

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
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  for (const [name, value] of Object.entries(EARLIER[given.get("view")] ?? {}))
    given.set(name, value);
  time = given.get("at") ?? "";
  const names = /** @type {string[]} */ ([...OTHERS, ...NAMES]);
  unknown = [...new Set(given.keys())].filter((name) => name !== "at" && !names.includes(name));
  const criteria = Object.fromEntries(names.map((name) => [name, given.get(name) ?? ""]));
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
  const given = new URLSearchParams(at ? { at } : {});
  for (const name of [...OTHERS, ...NAMES]) {
    if (criteria[name]) given.set(name, criteria[name]);
  }
  const text = given.toString().replaceAll("%2F", "/");
  return text ? `#${text}` : "#";
}

// Returns the choices of a filter. `isPaged`: the server lists only nodes with a GPU that matches the filters.
export function choicesOf(name, isPaged) {
  const all = { state: STATES, sort: SORTS }[name];
  return isPaged ? all.filter(([value]) => !UNPAGED[name].includes(value)) : all;
}

// Returns the path of the view at the time of the address.
export function viewPath() {
  return time ? `api/v1/view?at=${encodeURIComponent(time)}` : "api/v1/view";
}

// Returns the path of the view with the nodes that the page shows, if the server does not list all of them.
export function pagePath(criteria) {
  const { view, cluster } = criteria;
  const [gpu] = criteria.gpu.split("/"); // without the MIG instance
  if (["cost", "savings", "queue", "events"].includes(view)) return viewPath();
  const given = { at: time, gpu };
  if (criteria.pod) [given.ns, given.pod] = criteria.pod.split("/");
  if (criteria.job) {
    const { kind, namespace, name } = jobOf(criteria.job);
    given.ns = namespace;
    given.owner = `${kind}/${name}`;
  }
  if (criteria.pod || criteria.job) given.cluster = cluster;
  else if (!gpu)
    for (const name of [...FILTERS, "sort"])
      given[name] = UNPAGED[name]?.includes(criteria[name]) ? "" : criteria[name];
  const query = new URLSearchParams(Object.entries(given).filter(([, value]) => value));
  query.set("page", gpu || criteria.pod || criteria.job ? "1" : String(pageOf(criteria)));
  return `api/v1/view?${query}`;
}

export function pageOf({ page }) {
  return Math.max(1, Number.parseInt(page, 10) || 1);
}

// Returns the links to the previous and the next page; undefined if there is none.
export function neighbours(criteria, found) {
  const page = pageOf(criteria);
  const link = (number) =>
    number > 0 && (number - 1) * PAGE_SIZE < found
      ? writeHash({ ...criteria, page: number > 1 ? String(number) : "" })
      : undefined;
  return [link(page - 1), link(page + 1)];
}

export function podHash(namespace, pod, cluster, range) {
  return writeHash({ pod: `${namespace}/${pod}`, cluster, range });
}

// Returns the link to the page of a holder's owner.
export function jobHash({ namespace, owner, cluster }, range) {
  const at = owner.indexOf("/");
  return writeHash({
    job: `${owner.slice(0, at)}/${namespace}/${owner.slice(at + 1)}`,
    cluster,
    range,
  });
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

// Returns the shortest range that contains a time some seconds ago, and that still contains it for a while.
export function rangeFor(seconds) {
  return RANGES.find((_, i) => seconds < 0.9 * RANGE_HOURS[i] * 3600) ?? RANGES.at(-1);
}

// Returns the default range of charts: the shortest one that contains the time in the address. `now`: server's clock.
export function pastRange(now) {
  return time ? rangeFor(now - Number(time)) : RANGES[0];
}

// Returns a text that identifies the current view, without its filters.
export function placeOf({ view, pod, job, gpu, node, cluster }) {
  return writeHash({
    view,
    pod,
    job,
    gpu,
    node: view === "nodes" ? node : "",
    cluster: pod || job ? cluster : "",
  });
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
  const isOne = !cluster || !devices.some((device) => device.cluster);
  return isOne ? devices : devices.filter((device) => device.cluster === cluster);
}

export function matching(devices, criteria) {
  const words = wordsOf(criteria.q);
  const { ns, node, model } = criteria;
  const state = STATES.some(([name]) => name === criteria.state) ? criteria.state : "";
  return ofCluster(devices, criteria.cluster).filter(
    (device) =>
      (!node || device.node === node) &&
      (!model || device.model === model) &&
      (!state || device[state]) &&
      (!ns || device.holders.some((holder) => holder.namespace === ns)) &&
      words.every((word) => textOf(device).includes(word)),
  );
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
  broken: (device) => ({ broken: 2, warning: 1 })[device.severity] ?? 0,
  idle: (device) =>
    device.isIdle ? (device.idleSince === undefined ? -1e11 : -device.idleSince) : -1e12,
  wasted: (device) => device.wasted ?? -1,
  utilization: (device) => device.utilization ?? -1,
  memory: (device) => (device.memoryUsed ?? -1) / (device.memoryTotal || 1),
};

export function groupedByNode(devices) {
  const groups = new Map();
  for (const device of devices) {
    const group = groups.get(device.node);
    if (group) group.push(device);
    else groups.set(device.node, [device]);
  }
  return groups;
}

// Returns the devices of a pod. Without `cluster`, prefers the cluster that has no name.
export function podDevices(devices, namespace, pod, cluster) {
  const held = ofCluster(devices, cluster).filter((device) =>
    device.holders.some((h) => h.pod === pod && h.namespace === namespace),
  );
  const unnamed = held.filter((device) => !device.cluster);
  return unnamed.length ? unnamed : held;
}
