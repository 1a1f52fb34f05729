// The JSON of api/v1/view as a flat list of GPUs, each with all that filters, sorting and drawing ask about.

import { conditionsOf, gathered, severityOf } from "./conditions.js";
import { amountsOf, divideGpu, hasIdentity } from "./totals.js";

const BUCKETS = 5;
const LEAST_WORK = 256 * 1024 ** 2; // bytes: less than a CUDA context takes, more than a driver keeps for itself

export function devicesOf(picture, now) {
  const found = [];
  const counted = new Set();
  for (const node of picture.nodes ?? []) {
    for (const gpu of node.gpus ?? []) {
      const one = device(gpu, node, picture, now);
      one.isRepeated = hasIdentity(one.uuid) && counted.has(one.uuid); // another node says that it is its own
      counted.add(one.uuid);
      found.push(one);
    }
  }
  return found;
}

function device(gpu, node, picture, now) {
  const parts = (gpu.instances ?? []).map((instance) => part(instance));
  const ownHolders = holdersOf(gpu);
  const one = {
    key: `${node.name}\u0000${gpu.uuid}`,
    node: node.name,
    old: Boolean(node.old || node.gone),
    gone: Boolean(node.gone),
    absent: gpu.absent === true,
    uuid: gpu.uuid,
    index: gpu.index,
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
    holders: [...ownHolders, ...parts.flatMap((p) => p.ownHolders)],
  };
  const { holders } = one;
  one.conditions = gathered([one.ownConditions, ...parts.map((p) => p.ownConditions)]);
  const absent = one.absent || parts.some((p) => p.absent);
  one.broken = one.conditions.length > 0 || absent;
  one.severity = absent ? "broken" : severityOf(one.conditions);
  divideGpu(one, picture.idle_after_seconds !== undefined);
  one.amounts = amountsOf(one);
  one.held = holders.length > 0;
  one.used = one.amounts.used > 0;
  one.unknown = one.amounts.unknown > 0;
  one.free = one.amounts.free > 0;
  one.isIdle = one.held && holders.every((holder) => holder.use === "idle"); // all that is held of it
  one.idle = one.amounts.idle > 0;
  one.idleSince = one.isIdle ? idleSince(holders) : undefined;
  one.isMuted = one.isIdle && isFresh(one.idleSince, picture, now);
  one.mayWork = !one.held && (one.utilization > 0 || mayWork(one));
  one.wasted = wastedOf(holders);
  one.colour = colourOf(one);
  return one;
}

// Nobody measured whether it does, but something lies in its memory.
function mayWork(one) {
  return one.utilization === undefined && one.memoryUsed >= LEAST_WORK;
}

function part(instance) {
  const { slices, gpu_slices: all } = instance; // of compute; undefined: its profile does not say
  const one = {
    id: instance.id,
    profile: instance.profile ?? "",
    weight: slices ?? 1, // in the mean of its GPU's instances
    wanted: slices === undefined ? slices : Math.min(slices, all) / all, // of the GPU
    absent: instance.absent === true,
    ownConditions: conditionsOf(instance),
    utilization: instance.utilization_ratio,
    memoryUsed: instance.memory_used_bytes,
    memoryTotal: instance.memory_total_bytes,
    power: instance.power_watts,
  };
  one.ownHolders = holdersOf(instance, one);
  one.isFree = !one.ownHolders.length && !(one.utilization > 0) && !mayWork(one);
  return one;
}

function holdersOf(of, part) {
  return (of.holders ?? []).map((holder) => ({
    namespace: holder.namespace ?? "",
    pod: holder.pod ?? "",
    container: holder.container ?? "",
    name: nameOf(holder),
    owner: holder.owner?.name ? `${holder.owner.kind ?? ""}/${holder.owner.name}` : "",
    share: holder.share_ratio,
    utilization: holder.utilization_ratio,
    memory: holder.memory_used_bytes,
    processes: holder.processes,
    busySeconds: holder.busy_seconds,
    idleSeconds: holder.idle_seconds,
    energy: holder.energy_joules,
    idleSince: holder.idle_since,
    cost: holder.cost_per_hour,
    part,
  }));
}

function lastHoldersOf(gpu) {
  const told = [gpu, ...(gpu.instances ?? [])].flatMap((of) => of.last_holders ?? []);
  return told.map((holder) => ({
    namespace: holder.namespace ?? "",
    pod: holder.pod ?? "",
    container: holder.container ?? "",
    name: nameOf(holder),
  }));
}

function nameOf(holder) {
  if (holder.job) return `job ${holder.job}`;
  if (holder.pod) return [holder.namespace, holder.pod].filter(Boolean).join("/");
  if (holder.container_id) return `container ${holder.container_id.slice(0, 12)}`;
  return holder.uid ? `pod ${holder.uid}` : "unknown holder";
}

// undefined: since when nobody knows.
function idleSince(holders) {
  const since = holders.map((holder) => holder.idleSince);
  return since.includes(undefined) ? undefined : since.reduce((latest, at) => Math.max(latest, at), 0);
}

// Idle for less than --idle-after: idle, but nothing to worry about yet.
function isFresh(since, picture, now) {
  const after = picture.idle_after_seconds;
  return after !== undefined && (since === undefined || now - since < after);
}

function wastedOf(holders) {
  const idle = holders.filter((holder) => holder.use === "idle" && holder.cost !== undefined);
  return idle.length ? idle.reduce((sum, holder) => sum + holder.cost, 0) : undefined;
}

function shortModel(model) {
  return model.replace(/^NVIDIA[ -]/, "");
}

function sumOf(parts, name) {
  const told = parts.filter((p) => p[name] !== undefined);
  return told.length ? told.reduce((sum, p) => sum + p[name], 0) : undefined;
}

function colourOf(one) {
  if (one.broken) return "broken";
  if (one.isIdle) return one.isMuted ? "resting" : "idle";
  if (!one.held && !one.mayWork) return "free";
  if (one.utilization === undefined || one.old) return "unknown";
  return `u${Math.min(BUCKETS - 1, Math.floor(one.utilization * BUCKETS))}`;
}

// What words are looked for in. Made when somebody filters: there are thousands.
export function textOf(one) {
  one.text ??= haystack(one);
  return one.text;
}

function haystack(one) {
  const words = [one.node, one.model, one.uuid, one.name];
  for (const part of one.parts) words.push(part.profile);
  for (const holder of one.holders) words.push(`${holder.name}/${holder.container}`, holder.owner);
  for (const holder of one.lastHolders) words.push(`${holder.name}/${holder.container}`);
  for (const condition of one.conditions) words.push(condition.name, condition.says);
  return words.join("\n").toLowerCase();
}
