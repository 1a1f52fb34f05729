// The JSON of api/v1/view as a flat list of GPUs, each with all that filters, sorting and drawing ask about.

const BUCKETS = 5;
const LEAST_WORK = 256 * 1024 ** 2; // bytes: less than a CUDA context takes, more than a driver keeps for itself

export function devicesOf(picture, now) {
  const found = [];
  for (const node of picture.nodes ?? []) {
    for (const gpu of node.gpus ?? []) found.push(device(gpu, node, picture, now));
  }
  return found;
}

function device(gpu, node, picture, now) {
  const parts = (gpu.instances ?? []).map((instance) => part(instance));
  const holders = [...holdersOf(gpu), ...parts.flatMap((p) => p.holders)];
  const idle = idleSince(holders, gpu, parts, picture, now);
  const one = {
    key: `${node.name}\u0000${gpu.uuid}`,
    node: node.name,
    old: Boolean(node.old),
    uuid: gpu.uuid,
    index: gpu.index,
    name: gpu.index === undefined ? "GPU" : `GPU ${gpu.index}`,
    model: shortModel(gpu.model ?? ""),
    utilization: meanOf(parts) ?? gpu.utilization_ratio,
    memoryUsed: gpu.memory_used_bytes ?? sumOf(parts, "memoryUsed"),
    memoryTotal: gpu.memory_total_bytes ?? sumOf(parts, "memoryTotal"),
    power: gpu.power_watts,
    temperature: gpu.temperature_celsius,
    energy: gpu.energy_joules,
    parts,
    holders,
    idle: idle !== undefined,
    idleSince: idle || undefined,
  };
  one.held = holders.length > 0;
  one.used = one.utilization > 0 || holders.some((holder) => holder.utilization > 0);
  one.unknown = isUnknown(one);
  one.free = !one.held && !one.used && !one.unknown;
  one.colour = colourOf(one);
  one.text = haystack(one);
  return one;
}

function isUnknown(one) {
  return one.utilization === undefined && !one.used && !one.idle && (one.held || mayWork(one));
}

// Nobody measured whether it does, but something lies in its memory.
function mayWork(one) {
  return one.utilization === undefined && one.memoryUsed >= LEAST_WORK;
}

function part(instance) {
  const one = {
    id: instance.id,
    profile: instance.profile ?? "",
    slices: Number(/^(\d+)g\./.exec(instance.profile ?? "")?.[1] ?? 1),
    utilization: instance.utilization_ratio,
    memoryUsed: instance.memory_used_bytes,
    memoryTotal: instance.memory_total_bytes,
  };
  one.holders = holdersOf(instance, one);
  one.free = !one.holders.length && !(one.utilization > 0) && !mayWork(one);
  return one;
}

function holdersOf(of, part) {
  return (of.holders ?? []).map((holder) => ({
    namespace: holder.namespace ?? "",
    pod: holder.pod ?? "",
    container: holder.container ?? "",
    name: nameOf(holder),
    share: holder.share_ratio,
    utilization: holder.utilization_ratio,
    memory: holder.memory_used_bytes,
    processes: holder.processes,
    busySeconds: holder.busy_seconds,
    idleSeconds: holder.idle_seconds,
    energy: holder.energy_joules,
    idleSince: holder.idle_since,
    part,
  }));
}

function nameOf(holder) {
  if (holder.job) return `job ${holder.job}`;
  if (holder.pod) return [holder.namespace, holder.pod].filter(Boolean).join("/");
  if (holder.container_id) return `container ${holder.container_id.slice(0, 12)}`;
  return holder.uid ? `pod ${holder.uid}` : "unknown holder";
}

// undefined: not idle. 0: idle, since when nobody knows.
function idleSince(holders, gpu, parts, picture, now) {
  if (!holders.length) return undefined;
  let latest = 0;
  for (const holder of holders) {
    const since = holder.idleSince;
    if (since === undefined) {
      if (picture.idle_after_seconds !== undefined || !doesNothing(holder, gpu)) return undefined;
      latest = undefined;
    } else if (now - since < (picture.idle_after_seconds ?? 0)) {
      return undefined;
    } else if (latest !== undefined) {
      latest = Math.max(latest, since);
    }
  }
  return latest ?? 0;
}

function doesNothing(holder, gpu) {
  if (holder.utilization > 0) return false;
  if (holder.processes !== undefined) return holder.processes === 0;
  return (holder.part ? holder.part.utilization : gpu.utilization_ratio) === 0;
}

function shortModel(model) {
  return model.replace(/^NVIDIA[ -]/, "");
}

// A GPU in MIG mode counts by its instances, each by its compute slices: it has no utilisation of its own.
function meanOf(parts) {
  const told = parts.filter((p) => p.utilization !== undefined);
  const slices = told.reduce((sum, p) => sum + p.slices, 0);
  return slices ? told.reduce((sum, p) => sum + p.utilization * p.slices, 0) / slices : undefined;
}

function sumOf(parts, name) {
  const told = parts.filter((p) => p[name] !== undefined);
  return told.length ? told.reduce((sum, p) => sum + p[name], 0) : undefined;
}

function colourOf(device) {
  if (device.idle) return "idle";
  if (device.free) return "free";
  if (device.utilization === undefined) return "unknown";
  return `u${Math.min(BUCKETS - 1, Math.floor(device.utilization * BUCKETS))}`;
}

function haystack(device) {
  const words = [device.node, device.model, device.uuid, device.name];
  for (const one of device.parts) words.push(one.profile);
  for (const holder of device.holders) words.push(`${holder.name}/${holder.container}`);
  return words.join("\n").toLowerCase();
}

// Of the nodes that answer: what is old says nothing about now. `mean`: of the utilisation of those in use, as their
// tiles show it.
export function totalsOf(devices) {
  const totals = { gpus: 0, held: 0, used: 0, free: 0, idle: 0, unknown: 0, old: 0, colours: {} };
  let busy = 0;
  let measured = 0;
  for (const one of devices) {
    if (one.old) {
      totals.old += 1;
      continue;
    }
    totals.gpus += 1;
    totals.held += one.held;
    totals.free += one.free;
    totals.used += one.used;
    totals.idle += one.idle;
    totals.unknown += one.unknown;
    if (one.used && one.utilization !== undefined) {
      busy += one.utilization;
      measured += 1;
    }
    totals.colours[one.colour] = (totals.colours[one.colour] ?? 0) + 1;
  }
  totals.mean = measured ? busy / measured : undefined;
  return totals;
}
