// How many GPUs do what, and what that costs: for whatever is filtered the same sums that figures/totals.py has for all.

const BLIND = new Set(["lost", "unreadable", "driver_away", "node_gone"]); // nothing that is known is of now
const USES = ["used", "idle", "unknown"];
const NAMELESS = "gpu "; // what stands for a UUID where there is none: every node has a "gpu 0"

// What a holder does with what it holds. `watched`: somebody follows every holder, so that one without `idleSince` has run
// something lately.
export function useOf(of, holder, watched) {
  if (isBlind(of)) return "unknown";
  if (holder.idleSince !== undefined) return "idle";
  const ratio = holder.utilization ?? of.utilization;
  if (ratio > 0) return "used";
  // The driver's samples go to the busiest process alone: beside it, a 0 says nothing of who has a process too.
  if (holder.utilization === 0 && holder.processes > 0 && of.utilization > 0) return "unknown";
  if (ratio === undefined && holder.processes !== 0) return "unknown";
  return watched && ratio !== undefined ? "used" : "idle";
}

export function isBlind(of) {
  return of.absent || of.ownConditions.some((condition) => BLIND.has(condition.name));
}

// Gives every instance and every holder its part of the physical GPU (`amount`) and says what a holder does with it (`use`):
// an instance is what its compute slices are, a share a part of its device.
export function divideGpu(device, watched) {
  const slots = divided(device.parts.map((part) => part.wanted), 1);
  device.parts.forEach((part, i) => (part.amount = slots[i]));
  const left = Math.max(0, 1 - slots.reduce((sum, slot) => sum + slot, 0));
  const blind = device.old || (device.parts.length > 0 && isBlind(device));
  const held = [[device, device.parts.length ? left : 1], ...device.parts.map((part, i) => [part, slots[i]])];
  for (const [of, whole] of held) {
    const own = of.ownHolders;
    const amounts = divided(own.map(({ share }) => (share === undefined ? share : clamp(share) * whole)), whole);
    own.forEach((holder, i) => {
      holder.amount = amounts[i];
      holder.use = blind ? "unknown" : useOf(of, holder, watched);
    });
  }
}

// What each wants; undefined: an equal part of what the others leave. More than there is was wanted: all get less.
function divided(wanted, whole) {
  const total = wanted.reduce((sum, part) => sum + (part ?? 0), 0);
  const scale = total > whole ? whole / total : 1;
  const others = wanted.filter((part) => part === undefined).length;
  const left = Math.max(0, whole - total);
  return wanted.map((part) => (part === undefined ? left / others : part * scale));
}

function clamp(share) {
  return Math.min(1, Math.max(0, share));
}

export function amountsOf(device) {
  const amounts = { used: 0, idle: 0, unknown: 0 };
  for (const holder of device.holders) amounts[holder.use] += holder.amount;
  const allocated = Math.min(1, amounts.used + amounts.idle + amounts.unknown);
  return { ...amounts, allocated, free: allocated > 1 - 1e-9 ? 0 : 1 - allocated };
}

// A GPU that several nodes say is theirs counts where it is first told of. `priced`: there are prices.
export function totalsOf(devices, priced) {
  const totals = { gpus: 0, allocated: 0, used: 0, idle: 0, unknown: 0, free: 0, broken: 0, freeBroken: 0, freeBusy: 0, old: 0 };
  const [power, cost, wasted, busy] = [new Sum(), new Sum(), new Sum(), new Sum()];
  const colours = {};
  for (const device of devices) {
    if (device.isRepeated) continue;
    totals.gpus += 1;
    for (const use of USES) totals[use] += device.amounts[use];
    totals.broken += device.broken;
    totals.old += device.old && !device.gone; // who is gone is broken
    if (device.broken) totals.freeBroken += device.amounts.free;
    else if (device.mayWork) totals.freeBusy += 1; // nobody is known to hold it, but something works there
    if (!device.old) power.add(device.power);
    if (!device.old && device.utilization > 0) busy.add(device.utilization);
    for (const holder of device.holders) {
      cost.add(holder.cost);
      if (holder.use === "idle") wasted.add(holder.cost);
    }
    colours[device.colour] = (colours[device.colour] ?? 0) + 1;
  }
  const held = devices.some((device) => device.held);
  const hasCost = priced && (cost.known > 0 || !held);
  return {
    ...totals,
    ...written(totals),
    colours,
    power: power.known ? power.total : undefined,
    cost: hasCost ? cost.total : undefined,
    wasted: hasCost ? wasted.total : undefined,
    mean: busy.known ? busy.total / busy.known : undefined,
  };
}

// As they are written, to the hundredth of a GPU: what is written adds up too, so the largest rests are rounded up.
function written(totals) {
  const parts = USES.map((use) => totals[use] * 100);
  const whole = parts.map((part) => Math.floor(part + 1e-7));
  const allocated = Math.round(parts.reduce((sum, part) => sum + part, 0));
  const rests = USES.map((_, i) => i).sort((a, b) => parts[b] - whole[b] - (parts[a] - whole[a]));
  const missing = allocated - whole.reduce((sum, part) => sum + part, 0);
  rests.slice(0, Math.max(0, missing)).forEach((i) => (whole[i] += 1));
  const uses = Object.fromEntries(USES.map((use, i) => [use, whole[i] / 100]));
  return { ...uses, allocated: allocated / 100, free: Math.max(0, totals.gpus * 100 - allocated) / 100 };
}

export function hasIdentity(uuid) {
  return Boolean(uuid) && !uuid.startsWith(NAMELESS);
}

export class Sum {
  constructor() {
    this.total = 0;
    this.known = 0;
  }

  add(amount) {
    if (amount === undefined) return;
    this.total += amount;
    this.known += 1;
  }
}
