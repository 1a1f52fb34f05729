// What the GPUs of a pod or job come to. `held`: pairs of a device and its holder.

import { fact } from "./dom.js";
import { duration, perHour } from "./format.js";
import { ownMemory, ownPower, ownUtilization } from "./history.js";
import { Mean, Sum, sumOf, Waste } from "./totals.js";

export function heldTotals(held) {
  const totals = {
    gpus: sumOf(held.map(({ holder }) => holder.amount)),
    busy: new Mean(),
    memory: new Sum(),
    power: new Sum(),
    cost: new Sum(),
    waste: new Waste(),
    idleSince: idleSince(held),
  };
  for (const { device, holder } of held) {
    totals.cost.add(holder.cost);
    totals.waste.add(holder.waste);
    // The node does not respond, so the usage is out of date.
    if (device.gone) continue;
    totals.busy.add(ownUtilization(device, holder), holder.amount);
    totals.memory.add(ownMemory(device, holder));
    totals.power.add(ownPower(device, holder));
  }
  return totals;
}

// Returns since when all GPUs are idle; undefined if one is not.
function idleSince(held) {
  const since = held.map(({ holder }) => holder.idleSince);
  const areAllIdle = since.length > 0 && since.every((time) => time !== undefined);
  return areAllIdle ? Math.max(...since) : undefined;
}

// `wastedTitle`: title of the waste per hour.
export function idleAndCost({ idleSince, cost, waste }, context, wastedTitle) {
  const currency = context.prices();
  const facts = [];
  if (idleSince !== undefined) facts.push(fact("Idle for", duration(context.now() - idleSince)));
  if (cost.known > 0) facts.push(fact("Cost", perHour(cost.total, currency)));
  if (waste.total > 0) facts.push(fact(wastedTitle, waste.fullText(perHour, currency)));
  return facts;
}
