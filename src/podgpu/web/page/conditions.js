// Titles for conditions of a GPU or its node. The names are the label values of
// podgpu_device_health. If a newer server reports an unknown condition, its name is shown.

import { duration, localTimes, plural } from "./format.js";

const TITLES = {
  lost: "Lost",
  unreadable: "Unreadable",
  recovery_action: "Needs recovery",
  xid: "XID error",
  row_remap_failure: "Row remap failed",
  row_remap_pending: "Row remap pending",
  ecc: "ECC errors",
  thermal: "Throttled by heat",
  power_brake: "Power brake",
  nvlink: "NVLink down",
  fabric: "No NVLink fabric",
  recurring: "Keeps failing",
  kubernetes_healthy: "Kubernetes calls it healthy",
  kubernetes_unhealthy: "Kubernetes calls it unhealthy",
  driver_away: "Driver away",
  node_gone: "Node gone",
  unallocated_use: "Used without an allocation",
  application_xid: "XID of an application",
  orphaned_memory: "Orphaned memory",
  idle: "Idle",
};
export const KUBERNETES_UNHEALTHY = "kubernetes_unhealthy";
// Problems of workloads, and opinions of Kubernetes: podgpu finds no problem of the GPU itself.
const HARMLESS = new Set([
  "unallocated_use",
  "application_xid",
  "orphaned_memory",
  "kubernetes_healthy",
  KUBERNETES_UNHEALTHY,
]);
const GRAVE = new Set([
  "lost",
  "unreadable",
  "recovery_action",
  "xid",
  "row_remap_failure",
  "ecc",
  "nvlink",
  "fabric",
  "recurring",
  "driver_away",
  "node_gone",
]);

const NOTHING = []; // shared, because nearly every GPU has no conditions

export function conditionTitle(name) {
  return TITLES[name] ?? String(name).replaceAll("_", " ");
}

export function isBroken(conditions) {
  return conditions.some((condition) => !HARMLESS.has(condition.name));
}

// Returns whether Kubernetes calls the GPU unhealthy, although podgpu finds no problem.
export function isRefused(conditions) {
  const isUnhealthy = conditions.some((condition) => condition.name === KUBERNETES_UNHEALTHY);
  return isUnhealthy && !isBroken(conditions);
}

// Returns the highest severity: "broken" (red), "warning" (amber) or "" (no colour).
export function severityOf(conditions) {
  if (!conditions.length) return "";
  return conditions.some((condition) => GRAVE.has(condition.name)) ? "broken" : "warning";
}

export function conditionsOf(device) {
  if (!device.conditions?.length) return NOTHING;
  const conditions = device.conditions.map((condition) => ({
    name: String(condition.condition),
    since: condition.since,
    says: localTimes(condition.says ?? ""),
    do: condition.do ?? "",
    checks: condition.checks ?? [],
  }));
  return graveFirst(conditions);
}

function graveFirst(conditions) {
  const grave = conditions.filter(({ name }) => GRAVE.has(name));
  const others = conditions.filter(({ name }) => !GRAVE.has(name));
  return [...grave, ...others];
}

// Returns the conditions of a GPU and its instances, without duplicates.
export function gathered(lists) {
  if (lists.every((list) => !list.length)) return NOTHING;
  const distinct = new Map();
  for (const condition of lists.flat()) {
    const key = `${condition.name}\n${condition.says}`;
    if (!distinct.has(key)) distinct.set(key, condition);
  }
  return graveFirst([...distinct.values()]);
}

// Text for a node whose exporter does not respond.
export function goneText(node) {
  const gpus = plural((node.gpus ?? []).length, "GPU");
  if (node.age_seconds === undefined) return `gone: ${gpus} cannot be read`;
  return `gone, last seen ${duration(node.age_seconds)} ago: ${gpus} cannot be read`;
}
