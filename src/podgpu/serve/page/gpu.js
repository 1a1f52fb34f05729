// A GPU's own view: what is wrong with it, its history, and everything that podgpu knows of it.

import { noneText, Question } from "./ask.js";
import { gpuHash, RANGES } from "./criteria.js";
import { fact, h, place, plain, setAttribute, setText } from "./dom.js";
import { fieldSections, sourceRows, xidRows } from "./fields.js";
import { celsius, energy, memoryOf, percent, perHour, watts } from "./format.js";
import { Rows, showText } from "./rows.js";
import { brokenText, idleText, Troubles } from "./tile.js";
import { NO_HISTORY, Timeline } from "./timeline.js";

const EVERY_SECONDS = 10;
const NO_FIELDS = "This server tells no more of it: its podgpu is older than this page.";

export class GpuView {
  constructor(context, onAnswer) {
    this.context = context;
    this.past = new Question(onAnswer);
    this.known = new Question(onAnswer);
    this.drawn = null;
    this.back = h("a", { href: "#", class: "back" }, "All GPUs");
    this.name = h("span");
    this.model = h("bdi", { class: "title-more" });
    this.node = h("bdi", { class: "title-more" });
    this.badge = h("span", { class: "badge" });
    this.uuid = h("code", { class: "uuid" });
    const title = h("h2", { class: "pod-title" }, this.name, this.model, this.node, this.badge);
    this.troubles = new Troubles();
    this.facts = h("dl", { class: "facts" });
    this.rows = new Rows();
    this.parts = h("nav", { class: "tabs", "aria-label": "Instances" });
    this.holding = h("section", {}, h("h3", {}, "Holders"), this.rows.element);
    this.timeline = new Timeline((criteria) => ({ gpu: criteria.gpu }));
    this.xids = h("ul", { class: "marks" });
    this.xidSection = h("section", {}, h("h3", {}, "XID errors"), this.xids);
    this.fields = h("div", { class: "fields" });
    this.sources = h("ul", { class: "marks" });
    this.sourceSection = h("section", {}, h("h3", {}, "Sources"), this.sources);
    this.method = h("p", { class: "about" });
    this.about = h("p", { class: "about" });
    const more = h("section", { class: "known" }, h("h2", {}, "Everything podgpu knows of it"), this.about, this.xidSection, this.fields, this.sourceSection, this.method);
    this.element = h("div", { class: "pod gpu" }, this.back, title, this.uuid, this.troubles.element, this.facts, this.holding, this.parts, this.timeline.element, more);
  }

  leave() {
    this.past.forget();
    this.known.forget();
    this.drawn = null;
  }

  // `back`: where "All GPUs" leads.
  show(devices, criteria, back) {
    setAttribute(this.back, "href", back);
    const [uuid, instance] = splitGpu(criteria.gpu);
    const one = devices.find((device) => device.uuid === uuid);
    const told = this.known.want(`api/v1/gpus/${encodeURIComponent(uuid)}`, EVERY_SECONDS);
    this.showHead(one, uuid, told.data);
    this.showParts(one, uuid, instance);
    this.showHistory(one, uuid, instance, criteria);
    this.showKnown(told);
  }

  showHead(one, uuid, told) {
    const now = this.context.now();
    setText(this.name, one?.name ?? nameOf(told?.gpu));
    setText(this.model, plain(one?.model ?? told?.gpu?.model ?? ""));
    showText(this.node, one || told ? `on ${plain(one?.node ?? told?.node ?? "")}` : "");
    setText(this.uuid, plain(uuid));
    const badge = one ? (one.broken ? brokenText(one) : idleText(one, now)) : "not there now";
    showText(this.badge, badge);
    this.badge.className = `badge badge-${one ? (one.broken ? one.severity : one.isMuted ? "resting" : "idle") : "old"}`;
    this.troubles.element.hidden = !one;
    this.facts.hidden = this.holding.hidden = !one;
    if (!one) return;
    this.troubles.show(one, now);
    this.rows.show(one, { now, cost: this.context.prices() });
    place(this.facts, factsOf(one, this.context.prices()));
    this.facts.hidden = one.absent || one.gone;
  }

  // The GPU itself and each of its instances has a history of its own.
  showParts(one, uuid, instance) {
    const choices = [["", "Whole GPU"], ...(one?.parts ?? []).map((part) => [String(part.id), `${part.profile} (${part.id})`])];
    this.parts.hidden = choices.length < 2;
    const said = JSON.stringify([uuid, instance, choices]);
    if (this.parts.hidden || said === this.saidParts) return;
    this.saidParts = said;
    place(this.parts, choices.map(([id, text]) => {
      const current = id === instance ? "true" : undefined;
      return h("a", { href: gpuHash(id ? `${uuid}/${id}` : uuid), "aria-current": current }, plain(text));
    }));
  }

  showHistory(one, uuid, instance, criteria) {
    const range = RANGES.includes(criteria.range) ? criteria.range : RANGES[0];
    this.timeline.showRange(range, criteria);
    const part = instance ? `&instance=${encodeURIComponent(instance)}` : "";
    const { state, data, message } = this.past.want(`api/v1/history/gpus/${encodeURIComponent(uuid)}?range=${range}${part}`, EVERY_SECONDS);
    if (state === "ready") this.timeline.show(data, [{ name: one?.name ?? "GPU", series: data.series }], one?.memoryTotal);
    else this.timeline.showNone(noneText(state, message, NO_HISTORY));
  }

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
    showText(this.method, data?.method ? `Use is measured by: ${plain(data.method)}` : "");
  }
}

// A UUID has no slash; behind it stands the instance.
function splitGpu(path) {
  const at = path.indexOf("/");
  return at < 0 ? [path, ""] : [path.slice(0, at), path.slice(at + 1)];
}

function nameOf(gpu) {
  return gpu?.index === undefined ? "GPU" : `GPU ${gpu.index}`;
}

function factsOf(one, currency) {
  return [
    fact("Utilisation", percent(one.utilization)),
    fact("Memory", memoryOf(one.memoryUsed, one.memoryTotal)),
    fact("Power", watts(one.power)),
    fact("Temperature", celsius(one.temperature)),
    one.energy !== undefined && fact("Energy", energy(one.energy)),
    fact("Allocated", percent(one.amounts.allocated)),
    one.price !== undefined && fact("Price", perHour(one.price, currency)),
    one.wasted !== undefined && fact("Wasted", perHour(one.wasted, currency)),
  ].filter(Boolean);
}
