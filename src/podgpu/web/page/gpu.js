// The view of one GPU: its problems and what to do, its figures in groups, its history, and all its fields.

import { commandsFor, Commands, copyButton, evictedText, ForgetButton } from "./actions.js";
import { noneText, Question } from "./ask.js";
import { conditionTitle } from "./conditions.js";
import { gpuHash, jobHash, nodeHash, pastRange, pastTime, RANGES } from "./criteria.js";
import { fact, h, place, plain, setAttribute, setText } from "./dom.js";
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
import { celsius, energy, memory, percent, perHour, watts } from "./format.js";
import { Rows, showText } from "./rows.js";
import { badgeClass, badgeText, Troubles } from "./tile.js";
import { NO_HISTORY, Timeline } from "./timeline.js";
import { wasteOf } from "./totals.js";
import { WaitMatrix } from "./waits.js";

const EVERY_SECONDS = 10;
const GROUPS = ["Now", "Memory", "Health", "Identity"];
const NOT_RECORDED =
  "Fields, XID errors and processes are shown only for now: the history does not have them.";
const NO_FIELDS = "This server provides no details: its podgpu is older than this page.";

export class GpuView {
  constructor(context, onAnswer) {
    this.context = context;
    this.past = new Question(onAnswer);
    this.known = new Question(onAnswer);
    this.events = new OwnEvents(onAnswer);
    this.drawn = null;
    this.back = h("a", { href: "#", class: "back" }, "All GPUs");
    this.name = h("span");
    this.model = h("bdi", { class: "title-more" });
    this.node = h("a", { class: "title-more" }, h("bdi"));
    this.badge = h("span", { class: "badge" });
    this.uuid = h("code");
    const title = h("h2", { class: "pod-title" }, this.name, this.model, this.node, this.badge);
    this.troubles = new Troubles();
    this.commands = new Commands();
    this.forget = new ForgetButton("Forget this GPU", () => ({
      uuids: [this.shown],
      node: this.onNode,
    }));
    this.groups = Object.fromEntries(GROUPS.map((name) => [name, h("dl")]));
    this.facts = h(
      "div",
      { class: "groups" },
      ...GROUPS.map((name) => h("section", {}, h("h3", {}, name), this.groups[name])),
    );
    this.rows = new Rows();
    this.parts = h("nav", { class: "tabs", "aria-label": "Instances" });
    this.running = h("ul", { class: "marks" });
    this.jobs = h("p", { class: "about" });
    this.holding = h("section", {}, h("h3", {}, "Holders"), this.rows.element, this.jobs);
    this.waits = new WaitMatrix();
    this.runningSection = h("section", {}, h("h3", {}, "Processes"), this.running);
    this.timeline = new Timeline((criteria) => ({ gpu: criteria.gpu }));
    this.xids = h("ul", { class: "marks" });
    this.xidSection = h(
      "section",
      {},
      h("h3", {}, "XID errors since the exporter started"),
      this.xids,
    );
    this.fields = h("div", { class: "fields" });
    this.sources = h("ul", { class: "marks" });
    this.sourceSection = h("section", {}, h("h3", {}, "Sources"), this.sources);
    this.method = h("p", { class: "about" });
    this.about = h("p", { class: "about" });
    this.none = h("p", { class: "message" }, "No node lists this GPU.");
    const uuid = h(
      "p",
      { class: "uuid" },
      this.uuid,
      copyButton("Copy", () => this.shown),
    );
    const fields = h(
      "details",
      {},
      h("summary", {}, "All fields"),
      this.fields,
      this.sourceSection,
      this.method,
    );
    const more = h("section", { class: "known" }, this.xidSection, this.about, fields);
    const actions = [this.troubles.element, this.commands.element, this.forget.element];
    this.element = h(
      "div",
      { class: "pod gpu" },
      this.back,
      title,
      uuid,
      this.none,
      ...actions,
      this.holding,
      this.facts,
      this.waits.element,
      this.runningSection,
      this.parts,
      this.timeline.element,
      this.events.element,
      more,
    );
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
    this.showHead(device, uuid, answer.data, hasPods);
    this.showGroups(device, answer.data);
    this.showParts(device, uuid, instance);
    this.showHistory(device, uuid, instance, criteria);
    this.showKnown(answer);
  }

  showHead(device, uuid, known, hasPods) {
    const now = this.context.now();
    setText(this.name, device?.name ?? nameOf(known?.gpu));
    setText(this.model, plain(device?.model ?? known?.gpu?.model ?? ""));
    const node = (this.onNode = device?.node ?? known?.node);
    this.node.hidden = node === undefined;
    setAttribute(this.node, "href", nodeHash(node ?? ""));
    setText(this.node.firstChild, `on ${plain(node ?? "")}`);
    setText(this.uuid, plain(uuid));
    showText(this.badge, device ? badgeText(device, now) : "not present");
    this.badge.className = device ? badgeClass(device) : "badge badge-old";
    this.none.hidden = Boolean(device);
    this.troubles.element.hidden = !device;
    this.holding.hidden = !device;
    this.forget.element.hidden = device && !pastTime() ? !device.absent && !device.gone : true;
    const isRepairable = device?.conditions.length && !pastTime();
    this.commands.show(
      isRepairable ? commandsFor(device, hasPods) : [],
      isRepairable ? evictedText([device]) : "",
    );
    const processes = device ? processRows(device) : [];
    place(this.running, processes);
    this.runningSection.hidden = !processes.length;
    this.waits.show(device);
    if (!device) return;
    this.troubles.show(device, now);
    this.troubles.element.classList.toggle("is-warning", device.severity === "warning");
    this.rows.show(device, { now, cost: this.context.prices(), isFull: true });
    place(this.jobs, jobLinks(device));
    this.jobs.hidden = !this.jobs.children.length;
  }

  showGroups(device, known) {
    const isThere = device && !device.absent && !device.gone;
    const fields = known?.fields ?? [];
    const facts = {
      Now: [...(isThere ? factsOf(device, this.context.prices()) : []), ...groupFacts(fields, NOW)],
      Memory: [...(isThere ? memoryFacts(device) : []), ...groupFacts(fields, MEMORY)],
      Health: healthFacts(device, fields, known?.xids),
      Identity: [
        ["Model", device?.model ?? known?.gpu?.model],
        ...groupFacts(fields, IDENTITY),
      ].filter(([, text]) => text),
    };
    const written = JSON.stringify(facts);
    if (written === this.writtenFacts) return;
    this.writtenFacts = written;
    for (const name of GROUPS) {
      place(
        this.groups[name],
        facts[name].map(([title, text]) => fact(title, h("bdi", {}, plain(text)))),
      );
      this.groups[name].parentElement.hidden = !facts[name].length;
    }
  }

  // The GPU and each of its instances have separate histories.
  showParts(device, uuid, instance) {
    const choices = [
      ["", "Whole GPU"],
      ...(device?.parts ?? []).map((part) => [String(part.id), `${part.profile} (${part.id})`]),
    ];
    this.parts.hidden = choices.length < 2;
    const written = JSON.stringify([uuid, instance, choices, pastTime()]);
    if (this.parts.hidden || written === this.writtenParts) return;
    this.writtenParts = written;
    place(
      this.parts,
      choices.map(([id, text]) => {
        const current = id === instance ? "true" : undefined;
        return h(
          "a",
          { href: gpuHash(id ? `${uuid}/${id}` : uuid), "aria-current": current },
          plain(text),
        );
      }),
    );
  }

  showHistory(device, uuid, instance, criteria) {
    const range = RANGES.includes(criteria.range)
      ? criteria.range
      : pastRange(this.context.clock());
    this.timeline.showRange(range, criteria);
    this.timeline.cluster = device?.cluster;
    this.events.show(`gpu=${encodeURIComponent(uuid)}`, range);
    const part = instance ? `&instance=${encodeURIComponent(instance)}` : "";
    const { state, data, message } = this.past.want(
      `api/v1/history/gpus/${encodeURIComponent(uuid)}?range=${range}${part}`,
      EVERY_SECONDS,
    );
    const whole = instance ? device?.parts.find((part) => String(part.id) === instance) : device;
    if (state === "ready")
      this.timeline.show(
        data,
        [{ name: device?.name ?? "GPU", series: data.series }],
        whole?.memoryTotal,
      );
    else this.timeline.showNone(noneText(state, message, NO_HISTORY));
  }

  /** @param {import("./ask.js").Answer} answer */
  showKnown({ state, data, message }) {
    showText(this.about, state === "ready" ? "" : noneText(state, message, NO_FIELDS));
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
  const at = path.indexOf("/");
  return at < 0 ? [path, ""] : [path.slice(0, at), path.slice(at + 1)];
}

function nameOf(gpu) {
  return gpu?.index === undefined ? "GPU" : `GPU ${gpu.index}`;
}

// Returns a row for each process, on a node without Kubernetes.
function processRows(device) {
  return device.holders.flatMap((holder) =>
    holder.running.map((process) => {
      const figures = [
        percent(process.utilization_ratio),
        memory(process.memory_used_bytes),
      ].filter(Boolean);
      return h(
        "li",
        {},
        plain([`${process.command} (pid ${process.pid})`, holder.name, ...figures].join(" · ")),
      );
    }),
  );
}

function factsOf(device, currency) {
  return [
    ["Utilisation", percent(device.utilization)],
    ["Power", watts(device.power)],
    ["Temperature", celsius(device.temperature)],
    ["Allocated", percent(device.amounts.allocated)],
    device.energy !== undefined && ["Energy since start", energy(device.energy)],
    device.price !== undefined && ["Price", perHour(device.price, currency)],
    device.wasted > 0 && ["Wasted", wasteOf(device.waste).fullText(perHour, currency)],
  ].filter(Boolean);
}

function memoryFacts({ memoryUsed, memoryTotal }) {
  const ratio = memoryTotal ? ` (${percent(memoryUsed / memoryTotal)})` : "";
  return [
    ["Used", `${memory(memoryUsed)}${memoryUsed === undefined ? "" : ratio}`],
    ["Total", memory(memoryTotal)],
  ];
}

function healthFacts(device, fields, xids) {
  const state = !device
    ? "not present"
    : device.conditions.length
      ? device.conditions.map(({ name }) => conditionTitle(name)).join(", ")
      : "ok";
  const links = fields.find((field) => field.name === "nvlinks_up");
  return [
    ["State", state],
    device?.kubernetes && ["For Kubernetes", device.kubernetes],
    xids && [
      "XID errors since the exporter started",
      xids.length
        ? xids
            .map(({ xid, total }) => `XID ${xid}${total > 1 ? ` (${total} times)` : ""}`)
            .join(", ")
        : "none",
    ],
    ...groupFacts(fields, HEALTH, isProblem),
    links && ["NVLinks up", String(links.value)],
  ].filter(Boolean);
}

function methodText({ method, improvement }) {
  if (method === "mps") return "Usage by container: not known under MPS";
  if (!method) return "";
  const measured = `Usage measured by: ${plain(method)}`;
  return improvement ? `${measured}. Better: ${plain(improvement)}` : measured;
}
