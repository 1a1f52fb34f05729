// The view of one GPU: its problems and what to do, its figures in groups, its history, and all its
// fields.

import { commandsFor, Commands, copyButton, evictedText, ForgetButton } from "./actions.js";
import { noneText, Question } from "./ask.js";
import { conditionTitle } from "./conditions.js";
import { gpuHash, jobHash, nodeHash, pastRange, pastTime, RANGES } from "./criteria.js";
import { fact, h, place, plain, setAttribute, setText, showText, tabs } from "./dom.js";
import { OwnEvents } from "./events.js";
import {
  fieldSections,
  groupFacts,
  HEALTH,
  IDENTITY,
  isProblem,
  MEMORY,
  NOW,
  sourceRows,
  xidRows,
} from "./fields.js";
import { celsius, dotted, energy, listed, memory, percent, perHour, watts } from "./format.js";
import { Rows } from "./rows.js";
import { badgeClass, badgeText, Troubles } from "./tile.js";
import { NO_HISTORY, Timeline } from "./timeline.js";
import { wasteOf } from "./totals.js";
import { WaitMatrix } from "./waits.js";

const EVERY_SECONDS = 10;
const GROUPS = ["Now", "Memory", "Health", "Identity"];
const NOT_RECORDED =
  "Fields, XID errors and processes are shown only for now: the history does not have them.";
const XID_TITLE = "XID errors since the exporter started";
const NO_FIELDS = "This server provides no details: its podgpu is older than this page.";

export class GpuView {
  constructor(context, onAnswer) {
    this.context = context;
    this.past = new Question(onAnswer);
    this.known = new Question(onAnswer);
    this.events = new OwnEvents(onAnswer);
    this.drawn = null;
    this.element = h("div", { class: "pod gpu" });
    this.addHead();
    this.addHolders();
    this.timeline = new Timeline((criteria) => ({ gpu: criteria.gpu }));
    this.element.append(this.timeline.element, this.events.element);
    this.addFields();
  }

  // Adds the names, the problems, and what to do.
  addHead() {
    this.back = h("a", { href: "#", class: "back" }, "All GPUs");
    this.name = h("span");
    this.model = h("bdi", { class: "title-more" });
    this.node = h("a", { class: "title-more" }, h("bdi"));
    this.badge = h("span", { class: "badge" });
    const title = h("h2", { class: "pod-title" }, this.name, this.model, this.node, this.badge);
    this.uuid = h("code");
    const copy = copyButton("Copy", () => this.shown);
    const uuid = h("p", { class: "uuid" }, this.uuid, copy);
    this.none = h("p", { class: "message" }, "No node lists this GPU.");
    this.troubles = new Troubles();
    this.commands = new Commands();
    this.forget = new ForgetButton("Forget this GPU", () => ({
      uuids: [this.shown],
      node: this.onNode,
    }));
    const actions = [this.troubles.element, this.commands.element, this.forget.element];
    this.element.append(this.back, title, uuid, this.none, ...actions);
  }

  // Adds the holders, the figures in groups, the waits, the processes, and tabs for the instances.
  addHolders() {
    this.rows = new Rows();
    this.jobs = h("p", { class: "about" });
    this.holding = h("section", {}, h("h3", {}, "Holders"), this.rows.element, this.jobs);
    this.groups = Object.fromEntries(GROUPS.map((name) => [name, h("dl")]));
    const sections = GROUPS.map((name) => h("section", {}, h("h3", {}, name), this.groups[name]));
    const facts = h("div", { class: "groups" }, ...sections);
    this.waits = new WaitMatrix();
    this.running = h("ul", { class: "marks" });
    this.runningSection = h("section", {}, h("h3", {}, "Processes"), this.running);
    this.parts = tabs("Instances");
    this.element.append(this.holding, facts, this.waits.element, this.runningSection, this.parts);
  }

  // Adds the XID errors and all fields.
  addFields() {
    this.xids = h("ul", { class: "marks" });
    this.xidSection = h("section", {}, h("h3", {}, XID_TITLE), this.xids);
    this.about = h("p", { class: "about" });
    this.fields = h("div", { class: "fields" });
    this.sources = h("ul", { class: "marks" });
    this.sourceSection = h("section", {}, h("h3", {}, "Sources"), this.sources);
    this.method = h("p", { class: "about" });
    const details = h("details", {}, h("summary", {}, "All fields"));
    details.append(this.fields, this.sourceSection, this.method);
    const known = h("section", { class: "known" }, this.xidSection, this.about, details);
    this.element.append(known);
  }

  leave() {
    this.forget.clear();
    for (const question of [this.past, this.known, this.events]) question.forget();
    this.drawn = null;
  }

  // `back`: target of the link "All GPUs". `hasPods`: true if kubectl can be used.
  show(devices, criteria, back, hasPods) {
    setAttribute(this.back, "href", back);
    const [uuid, instance] = splitGpu(criteria.gpu);
    this.shown = uuid;
    const device = devices.find((gpu) => gpu.uuid === uuid);
    const answer = pastTime()
      ? { state: "missing", message: NOT_RECORDED }
      : this.known.want(`api/v1/gpus/${encodeURIComponent(uuid)}`, EVERY_SECONDS);
    this.showHead(device, uuid, answer.data);
    this.showRepair(device, hasPods);
    this.showHolders(device);
    this.showGroups(device, answer.data);
    this.showParts(device, uuid, instance);
    this.showHistory(device, uuid, instance, criteria);
    this.showKnown(answer);
  }

  showHead(device, uuid, known) {
    const node = device?.node ?? known?.node;
    this.onNode = node;
    setText(this.name, device?.name ?? nameOf(known?.gpu));
    setText(this.model, plain(device?.model ?? known?.gpu?.model ?? ""));
    this.node.hidden = node === undefined;
    setAttribute(this.node, "href", nodeHash(node ?? ""));
    setText(this.node.firstChild, `on ${plain(node ?? "")}`);
    setText(this.uuid, plain(uuid));
    showText(this.badge, device ? badgeText(device, this.context.now()) : "not present");
    this.badge.className = device ? badgeClass(device) : "badge badge-old";
    this.none.hidden = Boolean(device);
  }

  // A GPU can be repaired only now.
  showRepair(device, hasPods) {
    this.troubles.element.hidden = !device;
    if (device) {
      this.troubles.show(device, this.context.now());
      this.troubles.element.classList.toggle("is-warning", device.severity === "warning");
    }
    const current = pastTime() ? undefined : device;
    if (current?.conditions.length) {
      this.commands.show(commandsFor(current, hasPods), evictedText([current]));
    } else {
      this.commands.show([]);
    }
    const isLost = current?.absent || current?.gone;
    this.forget.element.hidden = !isLost;
  }

  showHolders(device) {
    const processes = device ? processRows(device) : [];
    place(this.running, processes);
    this.runningSection.hidden = !processes.length;
    this.waits.show(device);
    this.holding.hidden = !device;
    if (!device) return;
    const { context } = this;
    this.rows.show(device, { now: context.now(), cost: context.prices(), isFull: true });
    const links = jobLinks(device);
    place(this.jobs, links);
    this.jobs.hidden = !links.length;
  }

  showGroups(device, known) {
    const isThere = device && !device.absent && !device.gone;
    const fields = known?.fields ?? [];
    const now = isThere ? factsOf(device, this.context.prices()) : [];
    const memory = isThere ? memoryFacts(device) : [];
    const model = device?.model ?? known?.gpu?.model;
    const identity = [["Model", model], ...groupFacts(fields, IDENTITY)];
    const facts = {
      Now: [...now, ...groupFacts(fields, NOW)],
      Memory: [...memory, ...groupFacts(fields, MEMORY)],
      Health: healthFacts(device, fields, known?.xids),
      Identity: identity.filter(([, text]) => text),
    };
    const written = JSON.stringify(facts);
    if (written === this.writtenFacts) return;
    this.writtenFacts = written;
    for (const name of GROUPS) {
      const elements = facts[name].map(([title, text]) => fact(title, h("bdi", {}, plain(text))));
      place(this.groups[name], elements);
      this.groups[name].parentElement.hidden = !elements.length;
    }
  }

  // The GPU and each of its instances have separate histories.
  showParts(device, uuid, instance) {
    const parts = device?.parts ?? [];
    this.parts.hidden = !parts.length;
    const shown = parts.map((part) => [part.id, part.profile]);
    const written = JSON.stringify([uuid, instance, shown, pastTime()]);
    if (!parts.length || written === this.writtenParts) return;
    this.writtenParts = written;
    const link = (path, text, isChosen) => {
      const attributes = { href: gpuHash(path), "aria-current": isChosen && "true" };
      return h("a", attributes, plain(text));
    };
    const links = parts.map(({ id, profile }) =>
      link(`${uuid}/${id}`, `${profile} (${id})`, String(id) === instance),
    );
    place(this.parts, [link(uuid, "Whole GPU", instance === ""), ...links]);
  }

  showHistory(device, uuid, instance, criteria) {
    const isRange = RANGES.includes(criteria.range);
    const range = isRange ? criteria.range : pastRange(this.context.clock());
    this.timeline.showRange(range, criteria);
    this.timeline.cluster = device?.cluster;
    this.events.show(`gpu=${encodeURIComponent(uuid)}`, range);

    const part = instance ? `&instance=${encodeURIComponent(instance)}` : "";
    const url = `api/v1/history/gpus/${encodeURIComponent(uuid)}?range=${range}${part}`;
    const answer = this.past.want(url, EVERY_SECONDS);
    const { data } = answer;
    if (answer.state !== "ready") {
      this.timeline.showNone(noneText(answer, NO_HISTORY));
      return;
    }
    const isChosen = ({ id }) => String(id) === instance;
    const drawn = instance ? device?.parts.find(isChosen) : device;
    const line = { name: device?.name ?? "GPU", series: data.series };
    this.timeline.show(data, [line], drawn?.memoryTotal);
  }

  /** @param {import("./ask.js").Answer} answer */
  showKnown(answer) {
    const { data } = answer;
    showText(this.about, noneText(answer, NO_FIELDS));
    if (data === this.drawn) return;
    this.drawn = data;
    const list = (name) => (Array.isArray(data?.[name]) ? data[name] : []);
    place(this.xids, xidRows(list("xids")));
    this.xidSection.hidden = !list("xids").length;
    place(this.fields, fieldSections(list("fields")));
    place(this.sources, sourceRows(list("sources")));
    this.sourceSection.hidden = !list("sources").length;
    showText(this.method, methodText(data ?? {}));
  }
}

// Links to the pages of the owners of its pods.
function jobLinks(device) {
  const owners = new Map();
  for (const holder of device.holders) {
    if (holder.owner && holder.namespace)
      owners.set(jobHash(holder), `${plain(holder.owner)} of ${plain(holder.namespace)}`);
  }
  return [...owners].map(([href, text]) => h("a", { href }, `All GPUs of ${text}`));
}

// Splits UUID/INSTANCE. A UUID contains no slash.
function splitGpu(path) {
  const slash = path.indexOf("/");
  if (slash < 0) return [path, ""];
  return [path.slice(0, slash), path.slice(slash + 1)];
}

function nameOf(gpu) {
  return gpu?.index === undefined ? "GPU" : `GPU ${gpu.index}`;
}

// Returns a row for each process, on a node without Kubernetes.
function processRows(device) {
  const rows = [];
  for (const holder of device.holders) {
    for (const process of holder.running) rows.push(processRow(process, holder));
  }
  return rows;
}

function processRow(process, holder) {
  const texts = [
    `${process.command} (pid ${process.pid})`,
    holder.name,
    percent(process.utilization_ratio),
    memory(process.memory_used_bytes),
  ];
  return h("li", {}, plain(dotted(texts)));
}

function factsOf(device, currency) {
  const facts = [
    ["Utilisation", percent(device.utilization)],
    ["Power", watts(device.power)],
    ["Temperature", celsius(device.temperature)],
    ["Allocated", percent(device.amounts.allocated)],
  ];
  if (device.energy !== undefined) facts.push(["Energy since start", energy(device.energy)]);
  if (device.price !== undefined) facts.push(["Price", perHour(device.price, currency)]);
  if (device.wasted > 0) {
    facts.push(["Wasted", wasteOf(device.waste).fullText(perHour, currency)]);
  }
  return facts;
}

function memoryFacts({ memoryUsed, memoryTotal }) {
  const isRatioKnown = memoryTotal && memoryUsed !== undefined;
  const ratio = isRatioKnown ? ` (${percent(memoryUsed / memoryTotal)})` : "";
  return [
    ["Used", `${memory(memoryUsed)}${ratio}`],
    ["Total", memory(memoryTotal)],
  ];
}

// `xids`: undefined if they are not known.
function healthFacts(device, fields, xids) {
  const facts = [["State", stateText(device)]];
  if (device?.kubernetes) facts.push(["For Kubernetes", device.kubernetes]);
  if (xids) facts.push([XID_TITLE, listed(xids.map(xidText)) || "none"]);
  facts.push(...groupFacts(fields, HEALTH, isProblem));
  const links = fields.find((field) => field.name === "nvlinks_up");
  if (links) facts.push(["NVLinks up", String(links.value)]);
  return facts;
}

function stateText(device) {
  if (!device) return "not present";
  return listed(device.conditions.map(({ name }) => conditionTitle(name))) || "ok";
}

function xidText({ xid, total }) {
  return total > 1 ? `XID ${xid} (${total} times)` : `XID ${xid}`;
}

function methodText({ method, improvement }) {
  if (method === "mps") return "Usage by container: not known under MPS";
  if (!method) return "";
  const measured = `Usage measured by: ${plain(method)}`;
  return improvement ? `${measured}. Better: ${plain(improvement)}` : measured;
}
