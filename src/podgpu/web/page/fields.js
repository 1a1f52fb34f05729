// Shows the fields of one GPU: the important ones in four groups, and all of them with names, units
// and source.

import { isNamed, nameOf } from "./devices.js";
import { h, plain } from "./dom.js";
import { duration, energy, listed, memory, moment, UNKNOWN } from "./format.js";

/** @type {[string, RegExp][]} */
const GROUPS = [
  ["Errors", /XID|PCIE_REPLAY/],
  ["ECC and memory health", /ECC|RETIRED|REMAP|SRAM|THRESHOLD_SRM/],
  ["Throttling", /VIOLATION|THROTTLE|CLOCKS?_EVENT|SLOWDOWN_REASON/],
  ["Clocks", /CLOCK|PSTATE|AUTOBOOST/],
  ["Power and energy", /POWER|ENERGY/],
  ["Temperature and fans", /TEMP|FAN/],
  ["NVLink and fabric", /NVLINK|FABRIC|C2C|P2P/],
  ["PCIe", /PCI/],
  ["Memory", /_FB_|BAR1|FRAMEBUFFER/],
  ["Utilisation", /UTIL|PROF_|ACTIVE|OCCUPANCY/],
];
const REST = "Identity and modes";
// Units that are not shown.
const BARE = /^(count|number|string|enum|index|id|code|event|packed|bitmask|bitmap|gen\b|binary|$)/;
const SECONDS = { ns: 1e-9, us: 1e-6, ms: 1e-3, s: 1 };
const NUMBER = new Intl.NumberFormat("en", { maximumFractionDigits: 3 });

// Names of fields for which the server has no description.
const NAMES = {
  GPU_UTIL: "GPU utilisation",
  MEM_COPY_UTIL: "Memory bandwidth utilisation",
  ENC_UTIL: "Encoder utilisation",
  DEC_UTIL: "Decoder utilisation",
  FB_RESERVED: "Reserved memory",
  TOTAL_ENERGY_CONSUMPTION: "Energy since the driver was loaded",
  SYNC_BOOST_VIOLATION: "Sync boost throttling time",
  LOW_UTIL_VIOLATION: "Low utilisation throttling time",
  RELIABILITY_VIOLATION: "Reliability voltage throttling time",
  NVLINK_BANDWIDTH_TOTAL: "NVLink traffic",
  DRIVER_VERSION: "Driver version",
  VGPU_LICENSE_STATUS: "vGPU license",
  PROF_GR_ENGINE_ACTIVE: "Graphics engine active",
  PROF_SM_ACTIVE: "SMs active",
  PROF_SM_OCCUPANCY: "SM occupancy",
  PROF_PIPE_TENSOR_ACTIVE: "Tensor cores active",
  PROF_PIPE_FP64_ACTIVE: "FP64 pipe active",
  PROF_PIPE_FP32_ACTIVE: "FP32 pipe active",
  PROF_PIPE_FP16_ACTIVE: "FP16 pipe active",
  PROF_DRAM_ACTIVE: "Memory interface active",
  PROF_PCIE_TX_BYTES: "PCIe traffic sent",
  PROF_PCIE_RX_BYTES: "PCIe traffic received",
  PROF_NVLINK_TX_BYTES: "NVLink traffic sent",
  PROF_NVLINK_RX_BYTES: "NVLink traffic received",
};
// Fields of the groups at the top. Fields of HEALTH are shown only if they are not 0, because 0
// means no problem.
export const NOW = {
  PROF_PIPE_TENSOR_ACTIVE: "Tensor cores",
  SM_CLOCK: "SM clock",
  CLOCKS_EVENT_REASONS: "Clocks limited by",
  FAN_SPEED: "Fan",
};
export const MEMORY = {
  PROF_DRAM_ACTIVE: "Interface active",
  MEM_COPY_UTIL: "Bandwidth used",
  FB_FREE: "Free",
  FB_RESERVED: "Reserved",
  MEMORY_TEMP: "Temperature",
  MEM_CLOCK: "Clock",
};
export const HEALTH = {
  ECC_DBE_VOL_TOTAL: "Uncorrectable errors",
  ECC_SBE_VOL_TOTAL: "Corrected errors",
  UNCORRECTABLE_REMAPPED_ROWS: "Remapped rows",
  CORRECTABLE_REMAPPED_ROWS: "Remapped rows, corrected errors",
  ROW_REMAP_PENDING: "Row remap pending",
  ROW_REMAP_FAILURE: "Row remap failed",
  PCIE_REPLAY_COUNTER: "PCIe replays",
  NVLINK_REPLAY_ERROR_COUNT_TOTAL: "NVLink replays",
  THERMAL_VIOLATION: "Thermal throttling",
  POWER_VIOLATION: "Power throttling",
};
export const IDENTITY = {
  PCI_BUSID: "PCI bus ID",
  SERIAL: "Serial number",
  DRIVER_VERSION: "Driver",
  CUDA_COMPUTE_CAPABILITY: "Compute capability",
  VBIOS_VERSION: "VBIOS",
  MIG_MODE: "MIG",
};

function shortName(name) {
  return name.replace(/^DCGM_FI_(DEV_)?/, "");
}

// Returns [title, text] for each field of `group` that the server has.
export function groupFacts(fields, group, isWanted = (_field) => true) {
  const byName = new Map();
  for (const field of fields) {
    if (typeof field?.name === "string") byName.set(shortName(field.name), field);
  }
  const facts = [];
  for (const [name, title] of Object.entries(group)) {
    const field = byName.get(name);
    if (field && isWanted(field)) facts.push([title, valueText(field)]);
  }
  return facts;
}

export function isProblem({ value }) {
  return Boolean(value) && value !== "0";
}

// Sections, in the order that is most useful for troubleshooting.
export function fieldSections(fields) {
  const names = [...GROUPS.map(([name]) => name), REST];
  const groups = new Map(names.map((name) => [name, []]));
  for (const field of fields) {
    if (typeof field?.name === "string") groups.get(groupOf(field.name)).push(field);
  }
  return [...groups]
    .filter(([, members]) => members.length)
    .map(([name, members]) => section(name, members));
}

function groupOf(name) {
  const group = GROUPS.find(([, pattern]) => pattern.test(name.toUpperCase()));
  return group ? group[0] : REST;
}

function section(name, fields) {
  const list = h("dl", {}, ...fields.map(fieldRow));
  return h("section", { class: "field-group" }, h("h3", {}, name), list);
}

function fieldRow(field) {
  const title = h("dt", {}, wordsOf(field), h("code", {}, plain(field.name)));
  const value = h("dd", {}, h("bdi", {}, valueText(field)));
  if (field.source) value.append(h("span", { class: "field-source" }, plain(field.source)));
  return h("div", { class: "field" }, title, value);
}

export function valueText({ name = "", value, unit = "" }) {
  if (value === undefined || value === null || value === "") return UNKNOWN;
  if (typeof value === "boolean" || unit === "bool") return isProblem({ value }) ? "yes" : "no";
  if (typeof value !== "number") return plain(value);
  if (unit === "packed" && name.includes("CAPABILITY")) return `${value >>> 16}.${value & 0xffff}`;
  if (BARE.test(unit)) return NUMBER.format(value);
  if (unit === "bytes" || unit === "B") return memory(value);
  if (unit === "MiB") return memory(value * 1024 ** 2);
  if (unit === "J") return energy(value);
  if (unit === "mJ") return energy(value / 1000);
  if (unit in SECONDS) return timeText(value * SECONDS[unit]);
  if (unit.startsWith("ratio")) return `${NUMBER.format(Math.round(value * 1000) / 10)}\u202f%`;
  if (unit.startsWith("%")) return `${NUMBER.format(value)}\u202f%`;
  const isCelsius = unit === "C" || unit === "celsius";
  const shownUnit = isCelsius ? "\u00b0C" : plain(unit);
  return `${NUMBER.format(value)}\u00a0${shownUnit}`;
}

function timeText(seconds) {
  return seconds < 60 ? `${NUMBER.format(seconds)}\u00a0s` : duration(seconds);
}

// Derives a name for an unknown field: DCGM_FI_DEV_PCIE_LINK_GEN becomes "pcie link gen".
function wordsOf({ name, help }) {
  if (help) return plain(help).replace(/\.$/, "");
  const short = shortName(name);
  return NAMES[short] ?? plain(short).replaceAll("_", " ").toLowerCase();
}

function longName(workload) {
  if (!isNamed(workload)) return "a process outside pods";
  return [nameOf(workload), workload.container].filter(Boolean).join("/");
}

// "caused by research/train-0/main (python3, pid 4711), 3 times; beside serving/chat-0/main"
function culpritLine(culprit) {
  const who = longName(culprit);
  const names = listed([culprit.program, culprit.pid && `pid ${culprit.pid}`]);
  const process = names ? ` (${names})` : "";
  const times = culprit.total > 1 ? `, ${timesText(culprit.total)}` : "";
  const others = (culprit.affected ?? []).map(longName).join(", ");
  const beside = others ? `; beside ${others}` : "";
  return h("div", {}, plain(`caused by ${who}${process}${times}${beside}`));
}

function timesText(number) {
  return `${NUMBER.format(number)} times`;
}

export function xidRows(xids) {
  return xids.map(xidRow);
}

function xidRow(error) {
  const row = h("li");
  if (error.at !== undefined) row.append(h("span", { class: "mark-when" }, moment(error.at)));
  row.append(h("span", { class: "badge badge-broken" }, `XID ${plain(error.xid)}`));

  const culprits = (error.culprits ?? []).map(culpritLine);
  row.append(h("span", { class: "mark-says" }, plain(error.says ?? ""), ...culprits));

  const kind = listed([error.class, error.total > 1 && timesText(error.total)]);
  if (kind) row.append(h("span", { class: "field-source" }, plain(kind)));
  return row;
}

export function sourceRows(sources) {
  return sources.map(sourceRow);
}

function sourceRow(source) {
  const badge = source.ok
    ? h("span", { class: "badge badge-good" }, "answers")
    : h("span", { class: "badge badge-broken" }, "fails");
  const reason = source.ok ? "" : plain(source.message || source.error || "");
  return h(
    "li",
    {},
    badge,
    h("bdi", {}, plain(source.source ?? "")),
    h("span", { class: "mark-says" }, reason),
  );
}
