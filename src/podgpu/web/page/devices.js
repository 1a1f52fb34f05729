// Turns the JSON of api/v1/view into a flat list of GPUs with the values for filters, sorting and drawing.

import { conditionsOf, gathered, isBroken, isRefused, severityOf } from "./conditions.js";
import { amountsOf, wasteOf } from "./totals.js";

const BUCKETS = 5;
const LEAST_WORK = 256 * 1024 ** 2; // bytes; less than a CUDA context needs, but more than the driver itself uses

export function devicesOf(picture, now) {
  const devices = (picture.nodes ?? []).flatMap((node) =>
    (node.gpus ?? []).map((gpu) => deviceOf(gpu, node, picture, now)),
  );
  nameContainers(devices.flatMap((device) => [...device.holders, ...device.lastHolders]));
  return devices;
}

// The container is part of the shown name only if several containers of its pod hold GPUs.
function nameContainers(holders) {
  const only = new Map(); // the container of a pod, or undefined if it has several
  const keyOf = (holder) => `${holder.cluster}/${holder.name}`;
  for (const holder of holders) {
    const key = keyOf(holder);
    only.set(
      key,
      only.has(key) && only.get(key) !== holder.container ? undefined : holder.container,
    );
  }
  for (const holder of holders)
    holder.shownContainer =
      holder.pod && only.get(keyOf(holder)) !== undefined ? "" : holder.container;
}

function deviceOf(gpu, node, picture, now) {
  const parts = (gpu.instances ?? []).map(partOf);
  const ownHolders = holdersOf(gpu);
  roundWithin(ownHolders, gpu.utilization_ratio);
  const device = {
    key: `${node.name}\u0000${gpu.uuid}`,
    node: node.name,
    cluster: node.cluster ?? "",
    old: Boolean(node.old || node.gone),
    gone: Boolean(node.gone),
    absent: gpu.absent === true,
    uuid: gpu.uuid,
    index: gpu.index,
    repair: gpu.repair,
    kubernetes: kubernetesText(gpu),
    name: gpu.index === undefined ? "GPU" : `GPU ${gpu.index}`,
    model: shortModel(gpu.model ?? ""),
    utilization: gpu.utilization_ratio,
    memoryUsed: gpu.memory_used_bytes ?? sumOf(parts, "memoryUsed"),
    memoryTotal: gpu.memory_total_bytes ?? sumOf(parts, "memoryTotal"),
    power: gpu.power_watts ?? sumOf(parts, "power"),
    temperature: gpu.temperature_celsius,
    energy: gpu.energy_joules,
    price: gpu.price_per_hour,
    ownConditions: conditionsOf(gpu),
    lastHolders: lastHoldersOf(gpu),
    parts,
    ownHolders,
    holders: [...ownHolders, ...parts.flatMap((part) => part.ownHolders)],
  };
  const { holders } = device;
  for (const holder of [...holders, ...device.lastHolders]) holder.cluster = device.cluster;
  device.conditions = gathered([device.ownConditions, ...parts.map((part) => part.ownConditions)]);
  const absent = device.absent || parts.some((part) => part.absent);
  device.broken = isBroken(device.conditions) || absent;
  device.refused = isRefused(device.conditions) && !absent;
  device.severity = absent ? "broken" : severityOf(device.conditions);
  device.amounts = amountsOf(device);
  device.held = holders.length > 0;
  device.used = device.amounts.used > 0;
  device.isIdle = device.held && holders.every((holder) => holder.use === "idle"); // true if all its holders are idle
  device.idle = device.amounts.idle > 0;
  device.idleSince = device.isIdle ? idleSince(holders) : undefined;
  device.isMuted = device.isIdle && isFresh(device.idleSince, picture, now);
  device.mayWork = !device.held && (device.utilization > 0 || mayWork(device));
  const isFree = device.amounts.free > 0;
  device.free = isFree && !device.mayWork && !device.gone;
  device.unheld = isFree && !device.free;
  device.unknown = device.amounts.unknown > 0;
  device.waste = gpu.waste?.cost_per_hour;
  device.unheldCost = gpu.unheld_cost_per_hour; // in use without a known holder: paid for, and not wasted
  device.wasted = wasteOf(device.waste).total;
  device.colour = colourOf(device);
  return device;
}

// Returns whether the GPU may be in use: utilisation is unknown, but memory is in use.
function mayWork(device) {
  return device.utilization === undefined && device.memoryUsed >= LEAST_WORK;
}

// Returns what Kubernetes thinks about the GPU, and about each instance.
function kubernetesText(gpu) {
  const own = gpu.kubernetes_health;
  const parts = (gpu.instances ?? []).filter((instance) => instance.kubernetes_health);
  return [own, ...parts.map((instance) => `instance ${instance.id} ${instance.kubernetes_health}`)]
    .filter(Boolean)
    .join(", ");
}

function partOf(instance) {
  const part = {
    id: instance.id,
    profile: instance.profile ?? "",
    weight: instance.slices ?? 1, // weight in the mean over the GPU's instances
    amount: instance.part ?? 0, // fraction of the GPU
    absent: instance.absent === true,
    ownConditions: conditionsOf(instance),
    utilization: instance.utilization_ratio,
    memoryUsed: instance.memory_used_bytes,
    memoryTotal: instance.memory_total_bytes,
    power: instance.power_watts,
  };
  part.ownHolders = holdersOf(instance, part);
  part.isFree = !part.ownHolders.length && !(part.utilization > 0) && !mayWork(part);
  return part;
}

function holdersOf(of, part) {
  return (of.holders ?? []).map((holder) => ({
    namespace: holder.namespace ?? "",
    pod: holder.pod ?? "",
    container: holder.container ?? "",
    name: nameOf(holder),
    user: holder.user ?? "",
    owner: ownerOf(holder),
    share: holder.share_ratio,
    utilization: holder.utilization_ratio,
    memory: holder.memory_used_bytes,
    power: holder.power_watts,
    processes: holder.processes,
    running: holder.running ?? [],
    busySeconds: holder.busy_seconds,
    idleSeconds: holder.idle_seconds,
    energy: holder.energy_joules,
    idleSince: holder.idle_since,
    waited: holder.wait_ratio,
    waitsFor: (holder.waits_for ?? []).map(runnerOf),
    engine: holder.engine,
    cost: holder.cost_per_hour,
    waste: holder.waste?.cost_per_hour,
    amount: holder.part ?? 0, // fraction of the physical GPU
    use: holder.use ?? "unknown",
    unknownBecause: holder.unknown_because,
    part,
  }));
}

// Returns a holder that used the GPU while another one waited.
function runnerOf(part) {
  const isNamed = part.pod || part.job || part.uid || part.container_id || part.user;
  return {
    ratio: part.ratio ?? 0,
    seconds: part.seconds ?? 0,
    name: isNamed ? nameOf(part) : "processes outside pods",
    container: part.container ?? "",
  };
}

// Rounds the utilisation of several holders to whole per cents. Their sum does not exceed the rounded `whole`.
function roundWithin(holders, whole) {
  const shown = holders.filter((holder) => holder.utilization >= 0.01); // less is shown as "<1 %"
  if (shown.length < 2 || whole === undefined) return;
  const rounding = (holder) => Math.round(holder.utilization * 100) - holder.utilization * 100;
  let excess =
    shown.reduce((sum, holder) => sum + Math.round(holder.utilization * 100), 0) -
    Math.round(whole * 100);
  for (const holder of shown.sort((a, b) => rounding(b) - rounding(a))) {
    const lower = excess > 0 && rounding(holder) > 0;
    if (lower) excess -= 1;
    holder.utilization = (Math.round(holder.utilization * 100) - Number(lower)) / 100;
  }
}

function lastHoldersOf(gpu) {
  const holders = [gpu, ...(gpu.instances ?? [])].flatMap((of) => of.last_holders ?? []);
  return holders.map((holder) => ({
    namespace: holder.namespace ?? "",
    pod: holder.pod ?? "",
    container: holder.container ?? "",
    name: nameOf(holder),
  }));
}

// A job without Kubernetes has its user as its owner.
function ownerOf({ owner, job, user }) {
  if (owner?.name) return `${owner.kind ?? ""}/${owner.name}`;
  return job && user ? `user ${user}` : "";
}

export function nameOf(holder) {
  if (holder.hidden) return "other namespaces";
  if (holder.job) return `job ${holder.job}`;
  if (holder.pod) return [holder.namespace, holder.pod].filter(Boolean).join("/");
  const id = holder.container_id?.slice(0, 12);
  if (holder.uid) return id && !holder.container ? `pod ${holder.uid}/${id}` : `pod ${holder.uid}`;
  if (id) return `container ${id}`;
  return holder.user ? `user ${holder.user}` : "unknown holder";
}

// Returns the name of a recorded job. The record of a user without a job is "user NAME".
export function jobText(job) {
  return !job || job.startsWith("user ") ? job : `job ${job}`;
}

// Returns the names of a holder's programs on a node without Kubernetes.
export function commandsOf(holder) {
  return [...new Set(holder.running.map((process) => process.command))].filter(Boolean).join(", ");
}

// Returns since when all holders are idle; undefined if unknown.
function idleSince(holders) {
  const since = holders.map((holder) => holder.idleSince);
  return since.includes(undefined)
    ? undefined
    : since.reduce((latest, at) => Math.max(latest, at), 0);
}

// Returns true if the GPU has been idle for less than --idle-after. It is not highlighted yet.
function isFresh(since, picture, now) {
  const after = picture.idle_after_seconds;
  return after !== undefined && (since === undefined || now - since < after);
}

function shortModel(model) {
  return model.replace(/^NVIDIA[ -]/, "");
}

function sumOf(parts, name) {
  const known = parts.filter((part) => part[name] !== undefined);
  return known.length ? known.reduce((sum, part) => sum + part[name], 0) : undefined;
}

function colourOf(device) {
  if (device.broken) return "broken";
  if (device.isIdle) return device.isMuted ? "resting" : "idle";
  if (!device.held && !device.mayWork) return "free";
  if (device.utilization === undefined || device.old) return "unknown";
  return `u${Math.min(BUCKETS - 1, Math.floor(device.utilization * BUCKETS))}`;
}

// Returns the text that the search matches. Created on the first search, because there may be thousands of GPUs.
export function textOf(device) {
  device.text ??= haystack(device);
  return device.text;
}

function haystack(device) {
  const words = [device.node, device.model, device.uuid, device.name];
  for (const part of device.parts) words.push(part.profile);
  for (const holder of device.holders)
    words.push(`${holder.name}/${holder.container}`, holder.owner, commandsOf(holder));
  for (const holder of device.lastHolders) words.push(`${holder.name}/${holder.container}`);
  for (const condition of device.conditions) words.push(condition.name, condition.says);
  return words.join("\n").toLowerCase();
}
