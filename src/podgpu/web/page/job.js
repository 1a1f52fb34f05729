// The view of one job (or other owner of pods): its GPUs side by side, the slowest one, its cost
// and its history.

import { copyButton } from "./actions.js";
import { noneText, Question } from "./ask.js";
import {
  gpuHash,
  isOfScope,
  jobOf,
  ofCluster,
  pastRange,
  pastTime,
  podHash,
  RANGES,
  writeHash,
} from "./criteria.js";
import { fact, h, place, plain, setAttribute, setText, showText } from "./dom.js";
import {
  amount,
  count,
  gpuCount,
  memory,
  moment,
  money,
  percent,
  plural,
  watts,
} from "./format.js";
import { heldTotals, idleAndCost } from "./held.js";
import { ownMemory, ownPower, ownUtilization } from "./history.js";
import { filledColumns, Table } from "./table.js";
import { NO_HISTORY, Timeline } from "./timeline.js";
import { Mean, Sum, wasteOf } from "./totals.js";

const EVERY_SECONDS = 10;
const COST_SECONDS = 60;
const NOT_RECORDED =
  "Clocks and the slowest GPU are shown only for now: the history does not have them.";
// Tooltips of columns.
const HINTS = {
  tensor: "Ratio of time in which the tensor cores are active",
  dram: "Ratio of time in which the memory interface is active",
  capped: "Ratio of time in which the power limit lowered the clock",
  throttled: "Ratio of time in which heat or a power brake lowered the clock",
  traffic: "Over PCIe and NVLink",
};
// The column that shows the reason why a GPU is slow.
const REASON_COLUMNS = {
  power_limit: "limit",
  throttled: "throttled",
  waiting: "waited",
  clock: "clock",
  bytes: "traffic",
  tensor: "tensor",
};

export class JobView {
  // `onOrder` is called with the new order of the table.
  constructor(context, onOrder, onAnswer) {
    this.context = context;
    this.now = new Question(onAnswer);
    this.past = new Question(onAnswer);
    this.bill = new Question(onAnswer);
    this.back = h("a", { href: writeHash({ view: "pods", by: "job" }), class: "back" }, "All jobs");
    this.kind = h("span");
    this.name = h("bdi");
    this.badge = h("span", { class: "badge badge-warning" });
    const title = h("h2", { class: "pod-title" }, this.kind, this.name, this.badge);
    this.slow = h("p", { class: "verdict verdict-warning" });
    this.facts = h("dl", { class: "facts" });
    this.none = h("p", { class: "message" });
    this.about = h("p", { class: "about" });
    this.table = new Table("GPUs of this job", onOrder);
    this.copy = copyButton("Copy", () => this.table.asText());
    this.devices = h(
      "section",
      {},
      h("div", { class: "table-head" }, h("h2", {}, "GPUs side by side"), this.about, this.copy),
      this.table.element,
    );
    this.timeline = new Timeline(({ job, cluster, order }) => ({ job, cluster, order }));
    this.element = h(
      "div",
      { class: "pod job" },
      this.back,
      title,
      this.slow,
      this.facts,
      this.none,
      this.devices,
      this.timeline.element,
    );
  }

  leave() {
    for (const question of [this.now, this.past, this.bill]) question.forget();
  }

  show(devices, criteria) {
    const job = jobOf(criteria.job);
    const path = [job.kind, job.namespace, job.name].map(encodeURIComponent).join("/");
    // Clocks and the slowest GPU are known only for now.
    const measured = pastTime() ? undefined : this.now.want(`api/v1/jobs/${path}`, EVERY_SECONDS);
    const slowest = measured?.data?.slowest;
    const rows = rowsOf(ofCluster(devices, criteria.cluster), job, measured?.data?.devices ?? []);
    this.showTitle(job, criteria.cluster);
    this.showSlowest(slowest);
    this.showRows(rows, criteria, slowest?.reason);

    const isRange = RANGES.includes(criteria.range);
    const range = isRange ? criteria.range : pastRange(this.context.clock());
    const facts = [...factsOf(rows, this.context), ...this.billFacts(job, criteria, range)];
    this.facts.hidden = !rows.length;
    place(this.facts, facts);
    this.showHistory(path, range, criteria, slowest);
  }

  showTitle({ kind, namespace, name }, cluster) {
    setAttribute(this.back, "href", writeHash({ view: "pods", by: "job" }));
    setText(this.kind, plain(kind));
    setText(this.name, plain([cluster, namespace, name].filter(Boolean).join("/")));
  }

  showRows(rows, criteria, reason) {
    const none = pastTime()
      ? "No pod of this job held a GPU at this time."
      : "No pod of this job holds a GPU now.";
    this.none.hidden = rows.length > 0;
    setText(this.none, none);
    this.devices.hidden = !rows.length;
    showText(this.about, pastTime() ? NOT_RECORDED : "");
    if (!rows.length) return;
    const columns = filledColumns(columnsOf(reason), rows);
    this.table.show(rows, columns, criteria.order || "-name", (row) => row.key);
  }

  showSlowest(slowest) {
    this.badge.hidden = !slowest;
    this.slow.hidden = !slowest;
    if (!slowest) return;
    setText(this.badge, "one GPU is slower");
    const reason = plain(lowered(slowest.says));
    const since = moment(slowest.since);
    this.slow.replaceChildren(slowLink(slowest), ` is ${reason} Found at ${since}.`);
  }

  // Returns what the job cost in the range of the charts.
  billFacts({ kind, namespace, name }, { cluster }, range) {
    if (pastTime()) return [];
    const { data } = this.bill.want(`api/v1/range?range=${range}&by=owner`, COST_SECONDS);
    const isOwn = (row) => {
      if (row.owner?.kind !== kind || row.owner?.name !== name) return false;
      return isOfScope(row, { cluster, ns: namespace });
    };
    const row = (data?.rows ?? []).find(isOwn);
    if (!row) return [];

    const facts = [];
    const waste = wasteOf(row.waste?.cost);
    const last = `last ${range}`;
    if (row.cost !== undefined) facts.push(fact(`Cost, ${last}`, money(row.cost, data.currency)));
    if (waste.total > 0) facts.push(fact(`Wasted, ${last}`, waste.fullText(money, data.currency)));
    if (row.waited_hours > 0)
      facts.push(fact(`Waited, ${last}`, `${amount(row.waited_hours)}\u00a0GPU-hours`));
    return facts;
  }

  showHistory(path, range, criteria, slowest) {
    this.timeline.showRange(range, criteria);
    const url = `api/v1/history/jobs/${path}?range=${range}`;
    const answer = this.past.want(url, EVERY_SECONDS);
    const { data } = answer;
    if (answer.state !== "ready") {
      this.timeline.showNone(noneText(answer, NO_HISTORY));
      return;
    }
    const isSlowest = ({ uuid, instance = "" }) =>
      uuid === slowest?.uuid && instance === (slowest.instance ?? "");
    const lines = linesOf(data.devices, isSlowest);
    this.timeline.show(data, lines);
    if (!data.left_out) return;
    const all = plural(lines.length + data.left_out, "GPU");
    setText(this.about, `The charts show ${count(lines.length)} of ${all}.`);
  }
}

export function lowered(text) {
  return text.charAt(0).toLowerCase() + text.slice(1);
}

// Links to the slowest GPU of a job.
export function slowLink({ index, uuid, node }) {
  const gpu = index === undefined ? "a GPU" : `GPU ${index}`;
  return h("a", { href: gpuHash(uuid) }, plain(`${gpu} of ${node}`));
}

// Returns the lines of charts. `devices`: of an answer of api/v1/history.
export function linesOf(devices, isMarked = (_device) => false) {
  const nodes = new Set(devices.map((device) => device.node));
  const hasSeveral = nodes.size > 1;
  return devices.map((device) => ({
    name: lineName(device, hasSeveral),
    series: device.series,
    isMarked: isMarked(device),
  }));
}

function lineName({ node = "", index, uuid = "GPU", instance }, withNode) {
  const gpu = index === undefined ? plain(uuid).slice(0, 12) : `GPU ${index}`;
  const part = instance && `(${plain(instance)})`;
  return [withNode && plain(node), gpu, part].filter(Boolean).join(" ");
}

// Returns a row for each GPU or MIG instance, with the values of `measured`, the devices of
// api/v1/jobs.
function rowsOf(devices, { kind, namespace, name }, measured) {
  const owner = `${kind}/${name}`;
  const values = new Map();
  for (const device of measured) {
    values.set(`${device.node}/${device.uuid}/${device.instance ?? ""}`, device);
  }
  const rows = new Map();
  for (const device of devices) {
    for (const holder of device.holders) {
      if (holder.namespace !== namespace || holder.owner !== owner) continue;
      const { part } = holder;
      const instance = part ? part.id : "";
      const key = `${device.node}/${device.uuid}/${instance}`;
      if (!rows.has(key)) rows.set(key, new DeviceRow(key, device, part, values.get(key) ?? {}));
      rows.get(key).holders.push(holder);
    }
  }
  return [...rows.values()];
}

class DeviceRow {
  constructor(key, device, part, values) {
    this.key = key;
    this.device = device;
    this.values = values;
    this.holders = [];
    this.uuid = part ? `${device.uuid}/${part.id}` : device.uuid;
    this.name = part ? `${device.name} (${part.profile})` : device.name;
    this.isSlowest = values.is_slowest === true;
  }

  get pods() {
    return [...new Set(this.holders.map((holder) => holder.pod))];
  }

  add(valueOf) {
    const sum = new Sum();
    for (const holder of this.holders) sum.add(valueOf(holder));
    return sum.value;
  }
}

// `reason`: why the slowest GPU is slow.
function columnsOf(reason) {
  const isMarked = (name) => (_, row) => row.isSlowest && REASON_COLUMNS[reason] === name;
  const measured = (name, title, field, write) => ({
    name,
    title,
    hint: HINTS[name],
    value: (row) => row.values[field],
    write,
    isWarm: isMarked(name),
  });
  return [
    { name: "name", title: "GPU", value: nameOf, link: (row) => gpuHash(row.uuid) },
    { name: "pod", title: "Pod", value: (row) => row.pods.join(", "), link: podLink },
    { name: "utilisation", title: "Utilisation", value: utilizationOf, write: percent },
    measured("tensor", "Tensor cores", "tensor_active_ratio", percent),
    measured("dram", "Memory activity", "dram_active_ratio", percent),
    measured("clock", "SM clock", "sm_clock_mhz", clockText),
    { name: "power", title: "Power", value: powerOf, write: watts },
    { ...measured("limit", "Power limit", "power_limit_watts", watts), isWide: true },
    measured("capped", "At power limit", "power_capped_ratio", percent),
    measured("throttled", "Throttled", "throttled_ratio", percent),
    measured("traffic", "Traffic", "bytes_per_second", rateText),
    {
      name: "waited",
      title: "Waited",
      value: (row) => row.values.wait_ratio ?? row.holders[0].waited,
      write: percent,
      isWarm: isMarked("waited"),
    },
    { name: "memory", title: "Memory", value: memoryOf, write: memory, isWide: true },
  ];
}

function nameOf({ device, name, isSlowest }) {
  const gpu = `${device.node} ${name}`;
  return isSlowest ? `${gpu} \u00b7 slowest` : gpu;
}

function podLink({ holders, pods, device }) {
  return podHash(holders[0].namespace, pods[0], device.cluster);
}

function utilizationOf({ device, holders }) {
  return ownUtilization(device, holders[0]);
}

function powerOf(row) {
  return row.values.power_watts ?? row.add((holder) => ownPower(row.device, holder));
}

function memoryOf(row) {
  return row.add((holder) => ownMemory(row.device, holder));
}

function clockText(mhz) {
  return `${count(mhz)}\u00a0MHz`;
}

function rateText(bytesPerSecond) {
  return `${amount(bytesPerSecond / 1e9)}\u00a0GB/s`;
}

function factsOf(rows, context) {
  const held = rows.flatMap(({ device, holders }) => holders.map((holder) => ({ device, holder })));
  const totals = heldTotals(held);
  const waited = new Mean();
  for (const { device, holder } of held) {
    if (!device.gone) waited.add(holder.waited, holder.amount);
  }
  const nodes = new Set(rows.map((row) => row.device.node));
  const pods = new Set(held.map(({ holder }) => holder.pod));
  const facts = [
    fact("Holds", `${gpuCount(totals.gpus)} on ${plural(nodes.size, "node")}`),
    fact("Pods", count(pods.size)),
    fact("Mean use now", percent(totals.busy.value)),
    fact("Memory used", memory(totals.memory.value)),
    fact("Power", watts(totals.power.value)),
  ];
  if (waited.value !== undefined) facts.push(fact("Waits for others", percent(waited.value)));
  return [...facts, ...idleAndCost(totals, context, "Wasted now")];
}
