// The view of one job (or other owner of pods): its GPUs side by side, the slowest one, its cost and its history.

import { copyButton } from "./actions.js";
import { noneText, Question } from "./ask.js";
import {
  gpuHash,
  jobOf,
  ofCluster,
  pastRange,
  pastTime,
  podHash,
  RANGES,
  writeHash,
} from "./criteria.js";
import { fact, h, place, plain, setAttribute, setText } from "./dom.js";
import {
  amount,
  count,
  duration,
  memory,
  moment,
  money,
  parts,
  percent,
  perHour,
  plural,
  watts,
} from "./format.js";
import { ownMemory, ownPower, ownUtilization } from "./history.js";
import { showText } from "./rows.js";
import { Table } from "./table.js";
import { NO_HISTORY, Timeline } from "./timeline.js";
import { Mean, Sum, Waste, wasteOf } from "./totals.js";

const EVERY_SECONDS = 10;
const COST_SECONDS = 60;
const NOT_RECORDED =
  "Clocks and the slowest GPU are shown only for now: the history does not have them.";
// The column that shows the reason why a GPU is slow
const COLUMNS = {
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
    setAttribute(this.back, "href", writeHash({ view: "pods", by: "job" }));
    setText(this.kind, plain(job.kind));
    setText(
      this.name,
      plain([criteria.cluster, job.namespace, job.name].filter(Boolean).join("/")),
    );
    const path = [job.kind, job.namespace, job.name].map(encodeURIComponent).join("/");
    const answer = pastTime()
      ? { state: "missing" }
      : this.now.want(`api/v1/jobs/${path}`, EVERY_SECONDS);
    const rows = rowsOf(ofCluster(devices, criteria.cluster), job, answer.data?.devices ?? []);
    this.showSlowest(answer.data?.slowest);
    this.none.hidden = rows.length > 0;
    setText(
      this.none,
      pastTime()
        ? "No pod of this job held a GPU at this time."
        : "No pod of this job holds a GPU now.",
    );
    this.devices.hidden = this.facts.hidden = !rows.length;
    showText(this.about, pastTime() ? NOT_RECORDED : "");
    const columns = columnsOf(rows, answer.data?.slowest?.reason);
    if (rows.length) this.table.show(rows, columns, criteria.order || "-name", (row) => row.key);
    const range = RANGES.includes(criteria.range)
      ? criteria.range
      : pastRange(this.context.clock());
    place(this.facts, [...factsOf(rows, this.context), ...this.billFacts(job, criteria, range)]);
    this.showHistory(path, range, criteria, answer.data?.slowest);
  }

  showSlowest(slowest) {
    this.badge.hidden = this.slow.hidden = !slowest;
    if (!slowest) return;
    const gpu = slowest.index === undefined ? "a GPU" : `GPU ${slowest.index}`;
    setText(this.badge, "one GPU is slower");
    const link = h("a", { href: gpuHash(slowest.uuid) }, plain(`${gpu} of ${slowest.node}`));
    this.slow.replaceChildren(
      link,
      ` is ${plain(lowered(slowest.says))} Found at ${moment(slowest.since)}.`,
    );
  }

  // Returns what the job cost in the range of the charts.
  billFacts({ kind, namespace, name }, { cluster }, range) {
    if (pastTime()) return [];
    const { data } = this.bill.want(`api/v1/range?range=${range}&by=owner`, COST_SECONDS);
    const isOwn = (row) =>
      row.namespace === namespace &&
      row.owner?.kind === kind &&
      row.owner?.name === name &&
      (!cluster || row.cluster === cluster);
    const row = (data?.rows ?? []).find(isOwn);
    if (!row) return [];
    const waste = wasteOf(row.waste?.cost);
    return [
      row.cost !== undefined && fact(`Cost, last ${range}`, money(row.cost, data.currency)),
      waste.total > 0 && fact(`Wasted, last ${range}`, waste.fullText(money, data.currency)),
      row.waited_hours > 0 &&
        fact(`Waited, last ${range}`, `${amount(row.waited_hours)}\u00a0GPU-hours`),
    ].filter(Boolean);
  }

  showHistory(path, range, criteria, slowest) {
    this.timeline.showRange(range, criteria);
    const { state, data, message } = this.past.want(
      `api/v1/history/jobs/${path}?range=${range}`,
      EVERY_SECONDS,
    );
    if (state !== "ready") return this.timeline.showNone(noneText(state, message, NO_HISTORY));
    const several = new Set(data.devices.map((device) => device.node)).size > 1;
    const isSlowest = (device) =>
      slowest?.uuid === device.uuid && (slowest.instance ?? "") === (device.instance ?? "");
    const lines = data.devices.map((device) => ({
      name: lineName(device, several),
      series: device.series,
      isMarked: isSlowest(device),
    }));
    this.timeline.show(data, lines);
    if (data.left_out)
      setText(
        this.about,
        `The charts show ${count(lines.length)} of ${plural(lines.length + data.left_out, "GPU")}.`,
      );
  }
}

function lowered(text) {
  return text.charAt(0).toLowerCase() + text.slice(1);
}

export function lineName({ node, index, uuid, instance }, withNode) {
  const gpu = index === undefined ? plain(uuid ?? "GPU").slice(0, 12) : `GPU ${index}`;
  const part = instance ? ` (${plain(instance)})` : "";
  return `${withNode ? `${plain(node ?? "")} ` : ""}${gpu}${part}`;
}

// Returns a row for each GPU or MIG instance, with the values of `measured`, the devices of api/v1/jobs.
function rowsOf(devices, { kind, namespace, name }, measured) {
  const owner = `${kind}/${name}`;
  const values = new Map(
    measured.map((device) => [`${device.node}/${device.uuid}/${device.instance ?? ""}`, device]),
  );
  const rows = new Map();
  for (const device of devices) {
    for (const holder of device.holders) {
      if (holder.namespace !== namespace || holder.owner !== owner) continue;
      const instance = holder.part ? String(holder.part.id) : "";
      const key = `${device.node}/${device.uuid}/${instance}`;
      if (!rows.has(key))
        rows.set(key, new DeviceRow(key, device, holder.part, values.get(key) ?? {}));
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

  add(value) {
    const sum = new Sum();
    for (const holder of this.holders) sum.add(value(holder));
    return sum.known ? sum.total : undefined;
  }
}

// `reason`: why the slowest GPU is slow.
function columnsOf(rows, reason) {
  const marked = (name) => (_, row) => row.isSlowest && COLUMNS[reason] === name;
  const value = (name, title, field, write, hint) => ({
    name,
    title,
    hint,
    value: (row) => row.values[field],
    write,
    isWarm: marked(name),
  });
  const clock = (mhz) => `${count(mhz)}\u00a0MHz`;
  const rate = (bytes) => `${amount(bytes / 1e9)}\u00a0GB/s`;
  const columns = [
    {
      name: "name",
      title: "GPU",
      value: (row) => `${row.device.node} ${row.name}${row.isSlowest ? " \u00b7 slowest" : ""}`,
      link: (row) => gpuHash(row.uuid),
    },
    {
      name: "pod",
      title: "Pod",
      value: (row) => row.pods.join(", "),
      link: (row) => podHash(row.holders[0].namespace, row.pods[0], row.device.cluster),
    },
    {
      name: "utilisation",
      title: "Utilisation",
      value: (row) => ownUtilization(row.device, row.holders[0]),
      write: percent,
    },
    value(
      "tensor",
      "Tensor cores",
      "tensor_active_ratio",
      percent,
      "Ratio of time in which the tensor cores are active",
    ),
    value(
      "dram",
      "Memory activity",
      "dram_active_ratio",
      percent,
      "Ratio of time in which the memory interface is active",
    ),
    value("clock", "SM clock", "sm_clock_mhz", clock),
    {
      name: "power",
      title: "Power",
      value: (row) => row.values.power_watts ?? row.add((holder) => ownPower(row.device, holder)),
      write: watts,
    },
    { ...value("limit", "Power limit", "power_limit_watts", watts), isWide: true },
    value(
      "capped",
      "At power limit",
      "power_capped_ratio",
      percent,
      "Ratio of time in which the power limit lowered the clock",
    ),
    value(
      "throttled",
      "Throttled",
      "throttled_ratio",
      percent,
      "Ratio of time in which heat or a power brake lowered the clock",
    ),
    value("traffic", "Traffic", "bytes_per_second", rate, "Over PCIe and NVLink"),
    {
      name: "waited",
      title: "Waited",
      value: (row) => row.values.wait_ratio ?? row.holders[0].waited,
      write: percent,
      isWarm: marked("waited"),
    },
    {
      name: "memory",
      isWide: true,
      title: "Memory",
      value: (row) => row.add((holder) => ownMemory(row.device, holder)),
      write: memory,
    },
  ];
  return columns.filter(
    (column, i) => i < 2 || rows.some((row) => column.value(row) !== undefined),
  );
}

function factsOf(rows, context) {
  const own = rows.flatMap((row) => row.holders.map((holder) => [row.device, holder]));
  const [busy, used, power, waited, cost] = [
    new Mean(),
    new Sum(),
    new Sum(),
    new Mean(),
    new Sum(),
  ];
  const waste = new Waste();
  for (const [device, holder] of own) {
    cost.add(holder.cost);
    waste.add(holder.waste);
    if (device.gone) continue;
    busy.add(ownUtilization(device, holder), holder.amount);
    used.add(ownMemory(device, holder));
    power.add(ownPower(device, holder));
    waited.add(holder.waited, holder.amount);
  }
  const gpus = own.reduce((total, [, holder]) => total + holder.amount, 0);
  const nodes = new Set(rows.map((row) => row.device.node));
  const pods = new Set(own.map(([, holder]) => holder.pod));
  const since = own.map(([, holder]) => holder.idleSince);
  const idle = since.every((at) => at !== undefined) ? Math.max(...since) : undefined;
  const currency = context.prices();
  return [
    fact("Holds", `${parts(gpus)} ${gpus === 1 ? "GPU" : "GPUs"} on ${plural(nodes.size, "node")}`),
    fact("Pods", count(pods.size)),
    fact("Mean use now", percent(busy.value)),
    fact("Memory used", memory(used.known ? used.total : undefined)),
    fact("Power", watts(power.known ? power.total : undefined)),
    waited.value !== undefined && fact("Waits for others", percent(waited.value)),
    idle !== undefined && rows.length > 0 && fact("Idle for", duration(context.now() - idle)),
    cost.known > 0 && fact("Cost", perHour(cost.total, currency)),
    waste.total > 0 && fact("Wasted now", waste.fullText(perHour, currency)),
  ].filter(Boolean);
}
