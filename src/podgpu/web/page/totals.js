// Adds up GPUs by state for a filtered selection. The server computes which part of a GPU is in
// which state.

import { decimals } from "./format.js";

const ROUNDING_ERROR = 1e-9; // of a sum of fractions of a GPU
const USES = ["used", "idle", "unknown"];
const PARTS_OF_WASTE = { idle: "idle", underused: "under-used", unallocated: "unallocated" };

export function amountsOf(device) {
  const amounts = { used: 0, idle: 0, unknown: 0 };
  for (const holder of device.holders) amounts[holder.use] += holder.amount;
  const allocated = Math.min(1, amounts.used + amounts.idle + amounts.unknown);
  const rest = 1 - allocated;
  const free = rest < ROUNDING_ERROR ? 0 : rest;
  return { ...amounts, allocated, free };
}

// `priced`: prices are configured.
export function totalsOf(devices, priced) {
  const counted = countedOf(devices);
  const totals = { ...counted, ...roundedOf(counted), ...moneyOf(devices, priced) };
  return { ...totals, ...loadOf(devices), colours: coloursOf(devices) };
}

function countedOf(devices) {
  const counted = {
    gpus: devices.length,
    used: 0,
    idle: 0,
    unknown: 0,
    broken: 0,
    kubernetes_unhealthy: 0,
    gone: 0,
    freeBroken: 0,
    freeBusy: 0,
    freeGone: 0,
    old: 0,
  };
  for (const device of devices) {
    for (const use of USES) counted[use] += device.amounts[use];
    counted.broken += Number(device.broken);
    counted.kubernetes_unhealthy += Number(device.refused);
    counted.gone += Number(device.gone);
    // GPUs of nodes that do not respond count as broken instead.
    counted.old += Number(device.old && !device.gone);
    if (device.gone) counted.freeGone += device.amounts.free;
    else if (device.mayWork) counted.freeBusy += device.amounts.free;
    else if (device.broken) counted.freeBroken += device.amounts.free;
  }
  return counted;
}

// Returns power and mean utilisation of the GPUs with figures that are not old.
function loadOf(devices) {
  const power = new Sum();
  const busy = new Sum();
  for (const device of devices) {
    if (device.old) continue;
    power.add(device.power);
    if (device.utilization > 0) busy.add(device.utilization);
  }
  const mean = busy.known ? busy.total / busy.known : undefined;
  return { power: power.value, mean };
}

// Returns cost and waste per hour. They are unknown if GPUs are held, and no price is known.
function moneyOf(devices, priced) {
  const cost = new Sum();
  const waste = new Waste();
  let unpriced = 0;
  for (const device of devices) {
    for (const holder of device.holders) {
      cost.add(holder.cost);
      if (holder.cost === undefined) unpriced += holder.amount;
    }
    waste.add(device.waste);
    cost.add(device.waste?.unallocated);
    cost.add(device.unheldCost);
  }
  const isHeld = devices.some((device) => device.held);
  const unknown = { cost: undefined, waste: undefined, wasted: undefined };
  if (!priced) return { ...unknown, unpriced: 0 };

  const rounded = Math.round(unpriced * 100) / 100;
  if (isHeld && !cost.known) return { ...unknown, unpriced: rounded };
  // Without holders, an unknown waste is none.
  const wasted = isHeld ? waste.total : (waste.total ?? 0);
  return { cost: cost.total, waste, wasted, unpriced: rounded };
}

// Returns the number of devices of each colour.
function coloursOf(devices) {
  const colours = {};
  for (const { colour } of devices) colours[colour] = (colours[colour] ?? 0) + 1;
  return colours;
}

// Says how many GPUs only Kubernetes calls unhealthy. They are not broken.
export function refusedText(totals) {
  if (!totals.kubernetes_unhealthy) return "";
  return `Kubernetes calls ${totals.kubernetes_unhealthy} unhealthy`;
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
  const waste = wasteOf(rate?.cost_per_hour);
  const unallocated = waste.parts.unallocated ?? 0;
  const cost = held === undefined ? undefined : held + unheld + unallocated;
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
// holder is free, unless it seems to be in use (freeBusy) or its node does not respond (freeGone):
// then its holder is unknown (unheld). GPUs = allocated + free + unheld; allocated = used + idle +
// unknown.
function roundedOf(counted) {
  const [used, idle, unknown] = roundParts(USES.map((use) => counted[use]));
  // In hundredths, so that the differences are exact.
  const allocated = Math.round((used + idle + unknown) * 100);
  const unheld = Math.round((counted.freeBusy + counted.freeGone) * 100);
  const free = Math.max(0, counted.gpus * 100 - unheld - allocated);
  return {
    used,
    idle,
    unknown,
    unheld: unheld / 100,
    allocated: allocated / 100,
    free: free / 100,
  };
}

// Rounds to this number of decimals. Rounds the largest remainders up, so that the parts add up to
// their rounded sum.
export function roundParts(values, digits = 2) {
  const unit = 10 ** digits;
  const exact = values.map((value) => value * unit);
  // The summand keeps 2.9999999999, which is a 3 with an error of the sum, from becoming 2.
  const rounded = exact.map((value) => Math.floor(value + 1e-7));
  const remainders = exact.map((value, i) => ({ i, size: value - rounded[i] }));
  remainders.sort((a, b) => b.size - a.size);

  const missing = Math.round(sumOf(exact)) - sumOf(rounded);
  for (const { i } of remainders.slice(0, Math.max(0, missing))) rounded[i] += 1;
  return rounded.map((value) => value / unit);
}

export function sumOf(numbers) {
  return numbers.reduce((sum, number) => sum + number, 0);
}

export class Sum {
  constructor() {
    this.total = 0;
    this.known = 0; // how many of the amounts are known
    this.added = 0;
  }

  add(amount) {
    this.added += 1;
    if (amount === undefined) return;
    this.total += amount;
    this.known += 1;
  }

  // The total; undefined if no amount is known.
  get value() {
    return this.known ? this.total : undefined;
  }
}

// Adds up the cost of the parts of waste. The server decides what is wasted.
export class Waste {
  constructor() {
    this.parts = {}; // a part that is not known for any GPU is missing
  }

  add(cost) {
    if (!cost) return;
    for (const name of Object.keys(PARTS_OF_WASTE)) {
      if (cost[name] !== undefined) this.parts[name] = (this.parts[name] ?? 0) + cost[name];
    }
  }

  get total() {
    const known = Object.values(this.parts);
    return known.length ? sumOf(known) : undefined;
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

  // Returns the parts as text: "idle $1.00, under-used $2.00". `write`: money, perHour or
  // totalMoney.
  text(write, currency) {
    const rounded = this.rounded(currency);
    const texts = [];
    for (const [name, title] of Object.entries(PARTS_OF_WASTE)) {
      if (rounded[name] > 0) texts.push(`${title}\u00a0${write(rounded[name], currency)}`);
    }
    return texts.join(", ");
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
    this.total = 0;
    this.weight = 0;
  }

  // Old servers do not send the share. Then all weights are 1.
  add(value, part) {
    if (value === undefined) return;
    const weight = part || 1;
    this.total += value * weight;
    this.weight += weight;
  }

  get value() {
    return this.weight ? this.total / this.weight : undefined;
  }
}
