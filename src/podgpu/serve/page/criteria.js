// What is asked for, as it stands in the address after #, so that a link shows others the same; filtering and sorting.

export const STATES = [
  ["", "Any state"],
  ["held", "Allocated"],
  ["used", "Used"],
  ["free", "Free"],
  ["idle", "Idle, allocated"],
  ["unknown", "Not known"],
  ["old", "Old"],
];
export const SORTS = [
  ["", "By node"],
  ["idle", "Longest idle"],
  ["utilization", "Most utilised"],
  ["memory", "Fullest memory"],
];
export const SHOWS = [
  ["", "Tiles or map"],
  ["tiles", "Tiles"],
  ["map", "Map"],
];
export const NAMES = ["q", "ns", "node", "model", "state", "sort", "show"];
const FILTERS = ["q", "ns", "node", "model", "state"];

export function readHash(hash) {
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  const read = { pod: given.get("pod") ?? "", view: given.get("view") ?? "" };
  for (const name of NAMES) read[name] = given.get(name) ?? "";
  return read;
}

export function writeHash(criteria) {
  const given = new URLSearchParams();
  for (const name of ["view", "pod", ...NAMES]) {
    if (criteria[name]) given.set(name, criteria[name]);
  }
  const text = given.toString().replaceAll("%2F", "/");
  return text ? `#${text}` : "#";
}

export function podHash(namespace, pod) {
  return writeHash({ pod: `${namespace}/${pod}` });
}

export function isFiltered(criteria) {
  return FILTERS.some((name) => criteria[name]);
}

export function without(criteria) {
  return { ...criteria, ...Object.fromEntries(FILTERS.map((name) => [name, ""])) };
}

export function matching(devices, criteria) {
  const words = criteria.q.toLowerCase().split(/\s+/).filter(Boolean);
  const { ns, node, model, state } = criteria;
  return devices.filter(
    (one) =>
      (!node || one.node === node) &&
      (!model || one.model === model) &&
      (!state || one[state]) &&
      (!ns || one.holders.some((holder) => holder.namespace === ns)) &&
      words.every((word) => one.text.includes(word)),
  );
}

// Stable, and what is not known comes last.
export function sorted(devices, sort) {
  const rank = RANKS[sort];
  if (!rank) return devices;
  return devices
    .map((one) => [rank(one), one])
    .sort(([a], [b]) => b - a)
    .map(([, one]) => one);
}

const RANKS = {
  idle: (one) => (one.idle ? (one.idleSince === undefined ? -1e11 : -one.idleSince) : -Infinity),
  utilization: (one) => one.utilization ?? -1,
  memory: (one) => (one.memoryUsed ?? -1) / (one.memoryTotal || 1),
};

export function groupedByNode(devices) {
  const groups = new Map();
  for (const one of devices) {
    const group = groups.get(one.node);
    if (group) group.push(one);
    else groups.set(one.node, [one]);
  }
  return groups;
}

export function podDevices(devices, namespace, pod) {
  return devices.filter((one) => one.holders.some((h) => h.pod === pod && h.namespace === namespace));
}
