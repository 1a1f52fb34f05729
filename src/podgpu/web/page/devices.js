// Turns the JSON of api/v1/view into a flat list of GPUs with the values for filters, sorting and
// drawing.

import { conditionsOf, gathered, isBroken, isRefused, severityOf } from "./conditions.js";
import { listed } from "./format.js";
import { amountsOf, wasteOf } from "./totals.js";

const BUCKETS = 5;
// In bytes. Less than a CUDA context needs, but more than the driver itself uses.
const LEAST_WORK = 256 * 1024 ** 2;

export function devicesOf(picture, now) {
  const devices = (picture.nodes ?? []).flatMap((node) =>
    (node.gpus ?? []).map((gpu) => deviceOf(gpu, node, picture, now)),
  );
  nameContainers(devices.flatMap((device) => [...device.holders, ...device.lastHolders]));
  return devices;
}

// The container is part of the shown name only if several containers of its pod hold GPUs.
function nameContainers(holders) {
  const containers = new Map();
  const keyOf = (holder) => `${holder.cluster}/${holder.name}`;
  for (const holder of holders) {
    const key = keyOf(holder);
    if (!containers.has(key)) containers.set(key, new Set());
    containers.get(key).add(holder.container);
  }
  for (const holder of holders) {
    const isOnly = containers.get(keyOf(holder)).size === 1;
    holder.shownContainer = holder.pod && isOnly ? "" : holder.container;
  }
}

function deviceOf(gpu, node, picture, now) {
  const parts = (gpu.instances ?? []).map(partOf);
  const ownHolders = holdersOf(gpu);
  roundWithin(ownHolders, gpu.utilization_ratio);
  const lastHolders = lastHoldersOf(gpu);
  const holders = [...ownHolders, ...parts.flatMap((part) => part.ownHolders)];
  const cluster = node.cluster ?? "";
  for (const holder of [...holders, ...lastHolders]) holder.cluster = cluster;

  /** @type {Record<string, any>} */
  const device = {
    ...valuesOf(gpu, parts),
    key: `${node.name}\u0000${gpu.uuid}`,
    node: node.name,
    cluster,
    old: Boolean(node.old || node.gone),
    gone: Boolean(node.gone),
    absent: gpu.absent === true,
    uuid: gpu.uuid,
    index: gpu.index,
    repair: gpu.repair,
    kubernetes: kubernetesText(gpu),
    name: gpu.index === undefined ? "GPU" : `GPU ${gpu.index}`,
    model: shortModel(gpu.model ?? ""),
    lastHolders,
    parts,
    ownHolders,
    holders,
  };
  addHealth(device, conditionsOf(gpu));
  addUse(device, picture, now);
  device.colour = colourOf(device);
  return device;
}

// Returns what is measured, and what it costs.
function valuesOf(gpu, parts) {
  const waste = gpu.waste?.cost_per_hour;
  return {
    utilization: gpu.utilization_ratio,
    memoryUsed: gpu.memory_used_bytes ?? sumOf(parts, "memoryUsed"),
    memoryTotal: gpu.memory_total_bytes ?? sumOf(parts, "memoryTotal"),
    power: gpu.power_watts ?? sumOf(parts, "power"),
    temperature: gpu.temperature_celsius,
    energy: gpu.energy_joules,
    price: gpu.price_per_hour,
    waste,
    wasted: wasteOf(waste).total,
    // In use without a known holder: paid for, and not wasted.
    unheldCost: gpu.unheld_cost_per_hour,
  };
}

function addHealth(device, ownConditions) {
  const { parts } = device;
  const isAbsent = device.absent || parts.some((part) => part.absent);
  device.conditions = gathered([ownConditions, ...parts.map((part) => part.ownConditions)]);
  device.broken = isBroken(device.conditions) || isAbsent;
  device.refused = isRefused(device.conditions) && !isAbsent;
  device.severity = isAbsent ? "broken" : severityOf(device.conditions);
}

function addUse(device, picture, now) {
  const { holders } = device;
  device.amounts = amountsOf(device);
  device.held = holders.length > 0;
  device.used = device.amounts.used > 0;
  device.unknown = device.amounts.unknown > 0;

  // `idle`: a holder is idle. `isIdle`: all holders are.
  device.idle = device.amounts.idle > 0;
  device.isIdle = device.held && holders.every((holder) => holder.use === "idle");
  device.idleSince = device.isIdle ? idleSince(holders) : undefined;
  device.isMuted = device.isIdle && isFresh(device.idleSince, picture, now);

  const isFree = device.amounts.free > 0;
  device.mayWork = !device.held && isAtWork(device);
  device.free = isFree && !device.mayWork && !device.gone;
  device.unheld = isFree && !device.free;
}

// Returns whether the GPU is in use. If its utilisation is unknown, memory in use is a sign of it.
function isAtWork({ utilization, memoryUsed }) {
  if (utilization !== undefined) return utilization > 0;
  return memoryUsed >= LEAST_WORK;
}

// Returns what Kubernetes thinks about the GPU, and about each instance.
function kubernetesText(gpu) {
  const texts = [gpu.kubernetes_health];
  for (const { id, kubernetes_health: health } of gpu.instances ?? []) {
    if (health) texts.push(`instance ${id} ${health}`);
  }
  return listed(texts);
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
  part.isFree = !part.ownHolders.length && !isAtWork(part);
  return part;
}

// `part`: the instance, if they are not holders of the GPU itself.
function holdersOf(source, part) {
  return (source.holders ?? []).map((holder) => ({
    ...identityOf(holder),
    user: holder.user ?? "",
    owner: ownerOf(holder),
    utilization: holder.utilization_ratio,
    memory: holder.memory_used_bytes,
    power: holder.power_watts,
    running: holder.running ?? [],
    busySeconds: holder.busy_seconds,
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
function runnerOf(runner) {
  return {
    ratio: runner.ratio ?? 0,
    seconds: runner.seconds ?? 0,
    name: isNamed(runner) ? nameOf(runner) : "processes outside pods",
    container: runner.container ?? "",
  };
}

// A process outside pods has none of these.
export function isNamed({ pod, job, uid, container_id: container, user }) {
  return Boolean(pod || job || uid || container || user);
}

// Rounds the utilisation of several holders to whole per cents. Their sum does not exceed the
// rounded `whole`.
function roundWithin(holders, whole) {
  const shown = holders.filter((holder) => holder.utilization >= 0.01); // less is shown as "<1 %"
  if (shown.length < 2 || whole === undefined) return;

  const percents = (holder) => Math.round(holder.utilization * 100);
  const roundedUp = (holder) => percents(holder) - holder.utilization * 100;
  let excess = -Math.round(whole * 100);
  for (const holder of shown) excess += percents(holder);

  // Those that are rounded up most are rounded down instead.
  shown.sort((a, b) => roundedUp(b) - roundedUp(a));
  for (const holder of shown) {
    const isTooMuch = excess > 0 && roundedUp(holder) > 0;
    const rounded = isTooMuch ? percents(holder) - 1 : percents(holder);
    if (isTooMuch) excess -= 1;
    holder.utilization = rounded / 100;
  }
}

function lastHoldersOf(gpu) {
  const holders = [gpu, ...(gpu.instances ?? [])].flatMap((of) => of.last_holders ?? []);
  return holders.map(identityOf);
}

function identityOf(holder) {
  return {
    namespace: holder.namespace ?? "",
    pod: holder.pod ?? "",
    container: holder.container ?? "",
    name: nameOf(holder),
  };
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
  if (holder.uid && id && !holder.container) return `pod ${holder.uid}/${id}`;
  if (holder.uid) return `pod ${holder.uid}`;
  if (id) return `container ${id}`;
  return holder.user ? `user ${holder.user}` : "unknown holder";
}

// Returns the name of a recorded job. The record of a user without a job is "user NAME".
export function jobText(job) {
  if (!job || job.startsWith("user ")) return job;
  return `job ${job}`;
}

// Returns the names of a holder's programs on a node without Kubernetes.
export function commandsOf(holder) {
  return [...new Set(holder.running.map((process) => process.command))].filter(Boolean).join(", ");
}

// Returns since when all holders are idle; undefined if unknown.
function idleSince(holders) {
  const since = holders.map((holder) => holder.idleSince);
  if (since.includes(undefined)) return undefined;
  return Math.max(...since);
}

// Returns true if the GPU has been idle for less than --idle-after. It is not highlighted yet.
function isFresh(since, picture, now) {
  const after = picture.idle_after_seconds;
  if (after === undefined) return false;
  return since === undefined || now - since < after;
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
  const bucket = Math.floor(device.utilization * BUCKETS);
  return `u${Math.min(BUCKETS - 1, bucket)}`;
}

// Returns the text that the search matches. Created on the first search, because there may be
// thousands of GPUs.
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
