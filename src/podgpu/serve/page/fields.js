// Everything that is known of one GPU, in groups, in words and with units, and which source says it.

import { h, plain } from "./dom.js";
import { energy, memory, moment, UNKNOWN } from "./format.js";

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
const UNITS = { celsius: "\u00b0C", c: "\u00b0C", percent: "%", count: "", string: "", ratio: "", mhz: "MHz", w: "W" };
const NUMBER = new Intl.NumberFormat("en", { maximumFractionDigits: 3 });

// Sections, in the order in which people look for what is wrong.
export function fieldSections(fields) {
  const groups = new Map([...GROUPS.map(([name]) => [name, []]), [REST, []]]);
  for (const field of fields) {
    if (typeof field?.name === "string") groups.get(groupOf(field.name)).push(field);
  }
  return [...groups].filter(([, members]) => members.length).map(([name, members]) => section(name, members));
}

function groupOf(name) {
  return GROUPS.find(([, pattern]) => pattern.test(name.toUpperCase()))?.[0] ?? REST;
}

function section(name, fields) {
  const rows = fields.map((field) => {
    const source = field.source ? h("span", { class: "field-source" }, plain(field.source)) : undefined;
    const words = field.help ? plain(field.help) : plain(field.name);
    const title = h("dt", { title: plain(field.name) }, words, field.help ? h("code", {}, plain(field.name)) : undefined);
    return h("div", { class: "field" }, title, h("dd", {}, h("bdi", {}, valueText(field)), source));
  });
  return h("section", { class: "field-group" }, h("h3", {}, name), h("dl", {}, ...rows));
}

export function valueText({ value, unit = "" }) {
  if (value === undefined || value === null || value === "") return UNKNOWN;
  if (typeof value !== "number") return plain(value);
  if (/^(bytes|b)$/i.test(unit)) return memory(value);
  if (/^mib$/i.test(unit)) return memory(value * 1024 ** 2);
  if (/^m?j(oules)?$/i.test(unit)) return energy(/^m/i.test(unit) ? value / 1000 : value);
  if (/^ratio$/i.test(unit)) return `${NUMBER.format(value * 100)}\u202f%`;
  const sign = UNITS[unit.toLowerCase()] ?? plain(unit);
  return sign ? `${NUMBER.format(value)}\u00a0${sign}` : NUMBER.format(value);
}

export function xidRows(xids) {
  return xids.map((one) => {
    const badge = h("span", { class: "badge badge-broken" }, `XID ${plain(one.xid)}`);
    const kind = one.class ? h("span", { class: "field-source" }, plain(one.class)) : undefined;
    const when = one.at === undefined ? undefined : h("span", { class: "mark-when" }, moment(one.at));
    return h("li", {}, when, badge, h("span", { class: "mark-says" }, plain(one.says ?? "")), kind);
  });
}

export function sourceRows(sources) {
  return sources.map((one) => {
    const badge = h("span", { class: `badge badge-${one.ok ? "good" : "broken"}` }, one.ok ? "answers" : "fails");
    const why = one.ok ? "" : plain(one.message || one.error || "");
    return h("li", {}, badge, h("bdi", {}, plain(one.source ?? "")), h("span", { class: "mark-says" }, why));
  });
}
