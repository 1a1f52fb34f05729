// Adds up GPUs by state for a filtered selection. The server computes which part of a GPU is in which state.

import { decimals } from "./format.js";

const USES = ["used", "idle", "unknown"];
const PARTS_OF_WASTE = { idle: "idle", underused: "under-used", unallocated: "unallocated" };

export function amountsOf(device) {
  const amounts = { used: 0, idle: 0, unknown: 0 };
  for (const holder of device.holders) amounts[holder.use] += holder.amount;
  const allocated = Math.min(1, amounts.used + amounts.idle + amounts.unknown);
  return { ...amounts, allocated, free: allocated > 1 - 1e-9 ? 0 : 1 - allocated };
}

// `priced`: prices are configured.
export function totalsOf(devices, priced) {
  const totals = {
    gpus: 0,
    allocated: 0,
    used: 0,
    idle: 0,
    unknown: 0,
    free: 0,
    broken: 0,
    kubernetes_unhealthy: 0,
    gone: 0,
    freeBroken: 0,
    freeBusy: 0,
    freeGone: 0,
    old: 0,
    unpriced: 0,
  };
  const [power, cost, busy] = [new Sum(), new Sum(), new Sum()];
  const waste = new Waste();
  const colours = {};
  for (const device of devices) {
    totals.gpus += 1;
    for (const use of USES) totals[use] += device.amounts[use];
    totals.broken += device.broken;
    totals.kubernetes_unhealthy += device.refused;
    totals.gone += device.gone;
    totals.old += Number(device.old && !device.gone); // GPUs of nodes that do not respond count as broken instead
    const rest = device.gone
      ? "freeGone"
      : device.mayWork
        ? "freeBusy"
        : device.broken
          ? "freeBroken"
          : undefined;
    if (rest) totals[rest] += device.amounts.free;
    if (!device.old) power.add(device.power);
    if (!device.old && device.utilization > 0) busy.add(device.utilization);
    for (const holder of device.holders) {
      cost.add(holder.cost);
      if (holder.cost === undefined) totals.unpriced += holder.amount;
    }
    waste.add(device.waste);
    cost.add(device.waste?.unallocated);
    cost.add(device.unheldCost);
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
    waste: hasCost ? waste : undefined,
    wasted: hasCost ? (waste.total ?? (held ? undefined : 0)) : undefined,
    mean: busy.known ? busy.total / busy.known : undefined,
    unpriced: priced ? Math.round(totals.unpriced * 100) / 100 : 0,
  };
}

// Says how many GPUs only Kubernetes calls unhealthy. They are not broken.
export function refusedText(totals) {
  return totals.kubernetes_unhealthy
    ? `Kubernetes calls ${totals.kubernetes_unhealthy} unhealthy`
    : "";
}

// Returns the totals that the server computed, if it did not list all GPUs.
export function totalsOfServer({ totals }) {
  const {
    power_watts: power,
    cost_per_hour: held,
    unheld_cost_per_hour: unheld = 0,
    waste: rate,
    ...gpus
  } = totals;
  const waste = new Waste();
  waste.add(rate?.cost_per_hour);
  const cost = held === undefined ? undefined : held + unheld + (waste.parts.unallocated ?? 0);
  return {
    ...gpus,
    unheld: gpus.unheld_unknown ?? 0,
    power,
    cost,
    waste,
    wasted: waste.total,
    colours: {},
  };
}

// Rounds the totals to hundredths of a GPU, so that the parts add up to the total. A GPU without a
// holder is free, unless it seems to be in use (freeBusy) or its node does not respond (freeGone): then its holder is
// unknown (unheld). GPUs = allocated + free + unheld; allocated = used + idle + unknown.
function written(totals) {
  const rounded = roundParts(USES.map((use) => totals[use]));
  const uses = Object.fromEntries(USES.map((use, i) => [use, rounded[i]]));
  const allocated = Math.round(rounded.reduce((sum, part) => sum + part, 0) * 100);
  const unheld = Math.round((totals.freeBusy + totals.freeGone) * 100);
  const free = Math.max(0, totals.gpus * 100 - unheld - allocated);
  return { ...uses, unheld: unheld / 100, allocated: allocated / 100, free: free / 100 };
}

// Rounds to this number of decimals. Rounds the largest remainders up, so that the parts add up to
// their rounded sum.
export function roundParts(values, digits = 2) {
  const unit = 10 ** digits;
  const parts = values.map((value) => value * unit);
  const whole = parts.map((part) => Math.floor(part + 1e-7));
  const missing =
    Math.round(parts.reduce((sum, part) => sum + part, 0)) -
    whole.reduce((sum, part) => sum + part, 0);
  const rests = parts.map((_, i) => i).sort((a, b) => parts[b] - whole[b] - (parts[a] - whole[a]));
  rests.slice(0, Math.max(0, missing)).forEach((i) => (whole[i] += 1));
  return whole.map((part) => part / unit);
}

export class Sum {
  constructor() {
    this.total = 0;
    this.known = this.added = 0;
  }

  add(amount) {
    this.added += 1;
    if (amount === undefined) return;
    this.total += amount;
    this.known += 1;
  }
}

// Adds up the cost of the parts of waste. The server decides what is wasted.
export class Waste {
  constructor() {
    this.parts = {}; // a part that is not known for any GPU is missing
  }

  add(cost) {
    for (const name of Object.keys(PARTS_OF_WASTE)) {
      if (cost?.[name] !== undefined) this.parts[name] = (this.parts[name] ?? 0) + cost[name];
    }
  }

  get total() {
    const known = Object.values(this.parts);
    return known.length ? known.reduce((sum, part) => sum + part, 0) : undefined;
  }

  // Returns the parts as money shows them: they add up to the total as it is shown.
  rounded(currency) {
    return this.roundedTo(decimals(this.total ?? 0, currency));
  }

  roundedTo(digits) {
    const names = Object.keys(this.parts);
    const rounded = roundParts(Object.values(this.parts), digits);
    return Object.fromEntries(names.map((name, i) => [name, rounded[i]]));
  }

  // Returns the total and its parts: "$3.00 (idle $1.00, under-used $2.00)".
  fullText(write, currency) {
    return `${write(this.total, currency)} (${this.text(write, currency)})`;
  }

  // Returns the parts as text: "idle $1.00, under-used $2.00". `write`: money, perHour or totalMoney.
  text(write, currency) {
    const rounded = this.rounded(currency);
    const known = Object.entries(PARTS_OF_WASTE).filter(([name]) => rounded[name] > 0);
    return known
      .map(([name, title]) => `${title}\u00a0${write(rounded[name], currency)}`)
      .join(", ");
  }
}

export function wasteOf(cost) {
  const waste = new Waste();
  waste.add(cost);
  return waste;
}

// A mean, weighted by the share of a GPU.
export class Mean {
  constructor() {
    this.total = this.weight = 0;
  }

  // Old servers do not send the share. Then all weights are 1.
  add(value, part) {
    if (value === undefined) return;
    this.total += value * (part || 1);
    this.weight += part || 1;
  }

  get value() {
    return this.weight ? this.total / this.weight : undefined;
  }
}
