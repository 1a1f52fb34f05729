// The last stretch of every device's utilisation, a byte for each step of time, and the lines drawn of it. It begins with
// what the server kept (api/v1/history); where it keeps nothing, with the moment the page was opened.

import { svg } from "./dom.js";

const NONE = 255;
const SCALE = 200; // as the server writes it: a byte is round(ratio * 200)
const OWN_SLOTS = 120;
const OWN_STEP = 5;
const MOST_SLOTS = 1000;
const WIDTH = 120;
const HEIGHT = 28;

// All rings turn together: slot `number % slots` is the step of time `number`, counted from the epoch.
export class History {
  constructor() {
    this.start(OWN_SLOTS, OWN_STEP);
    this.seeds = new Map();
  }

  start(slots, step) {
    this.slots = slots;
    this.step = step;
    this.rings = new Map();
    this.number = undefined;
  }

  // `told`: the answer of api/v1/history. Everything begins anew with it.
  seed(told) {
    const step = Number(told.step_seconds);
    const slots = Number(told.points);
    if (!(step > 0) || !(slots > 1) || slots > MOST_SLOTS) return false;
    this.start(slots, step);
    this.seeds = new Map(Object.entries(told.devices ?? {}));
    this.seededFrom = Math.round(Number(told.from) / step);
    return true;
  }

  // `time`: now, by the server's clock.
  add(time, devices) {
    this.turnTo(Math.floor(time / this.step));
    for (const one of devices) {
      this.put(one.key, one.utilization, one);
      if (one.holders.length < 2) continue;
      for (const holder of one.holders) this.put(holderKey(one, holder), ownUtilization(one, holder));
    }
    for (const [key, ring] of this.rings) {
      if (this.number - ring.seen > this.slots) this.rings.delete(key);
    }
  }

  // The steps that nobody saw are empty; a clock that went back begins anew.
  turnTo(number) {
    const passed = this.number === undefined ? 0 : number - this.number;
    if (passed < 0) this.start(this.slots, this.step);
    if (passed > 0) {
      const empty = Math.min(passed, this.slots);
      for (const ring of this.rings.values()) {
        for (let i = 0; i < empty; i += 1) ring.values[(number - i) % this.slots] = NONE;
      }
    }
    this.number = number;
  }

  // Within a step it is the mean of what was seen.
  put(key, value, one) {
    let ring = this.rings.get(key);
    if (!ring) {
      if (value === undefined && !one) return;
      ring = { values: one ? this.seededRing(one) : new Uint8Array(this.slots).fill(NONE), sum: 0, count: 0 };
      this.rings.set(key, ring);
    }
    ring.seen = this.number;
    if (value === undefined) return;
    if (ring.number !== this.number) [ring.sum, ring.count, ring.number] = [0, 0, this.number];
    ring.sum += value;
    ring.count += 1;
    ring.values[this.number % this.slots] = Math.min(SCALE, Math.round((ring.sum / ring.count) * SCALE));
  }

  seededRing(one) {
    const values = new Uint8Array(this.slots).fill(NONE);
    const told = this.told(one.uuid) ?? this.toldOfParts(one);
    for (let i = 0; told && i < this.slots; i += 1) {
      const number = this.seededFrom + i;
      if (number <= this.number && number > this.number - this.slots) values[number % this.slots] = told[i] ?? NONE;
    }
    return values;
  }

  told(key) {
    const text = this.seeds.get(key);
    if (typeof text !== "string") return undefined;
    try {
      return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    } catch {
      return undefined; // no base64: nothing is known of it
    }
  }

  // A GPU in MIG mode has no utilisation of its own: the mean of its instances, by compute slices.
  toldOfParts(one) {
    const rows = one.parts.map((part) => [this.told(`${one.uuid}/${part.id}`), part.slices]).filter(([row]) => row);
    if (!rows.length) return undefined;
    return Uint8Array.from({ length: this.slots }, (_, i) => {
      const known = rows.filter(([row]) => (row[i] ?? NONE) !== NONE);
      const slices = known.reduce((sum, [, weight]) => sum + weight, 0);
      return slices ? Math.round(known.reduce((sum, [row, weight]) => sum + row[i] * weight, 0) / slices) : NONE;
    });
  }

  // Oldest first: a ratio, or undefined, for each step. `interval`: how often there is news; till then a value holds.
  values(key, interval) {
    const ring = this.rings.get(key);
    if (!ring) return [];
    const longest = Math.ceil((2 * interval) / this.step);
    let held;
    let since = 0;
    return Array.from({ length: this.slots }, (_, i) => {
      const byte = ring.values[(this.number + 1 + i) % this.slots];
      since = byte === NONE ? since + 1 : 0;
      if (byte !== NONE) held = byte / SCALE;
      return since > longest ? undefined : held;
    });
  }

  get seconds() {
    return this.slots * this.step;
  }
}

export function holderKey(one, holder) {
  return `${one.key} ${holder.part?.id ?? ""} ${holder.name} ${holder.container}`;
}

export function ownUtilization(one, holder) {
  if (holder.utilization !== undefined) return holder.utilization;
  if (holder.part) return holder.part.ownHolders.length === 1 ? holder.part.utilization : undefined;
  return one.holders.length === 1 ? one.utilization : undefined;
}

export class Sparkline {
  constructor(label) {
    this.area = svg("path", { class: "spark-area" });
    this.line = svg("path", { class: "spark-line" });
    const box = { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none" };
    this.element = svg("svg", { ...box, role: "img", "aria-label": label }, this.area, this.line);
  }

  // A value for each step, oldest first; a lone one is a short dash.
  draw(values) {
    const width = WIDTH / values.length;
    let line = "";
    let area = "";
    let run = [];
    const finish = () => {
      if (run.length) {
        const points = run.length > 1 ? run : [[run[0][0] - width, run[0][1]], run[0]];
        const said = points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join("L");
        line += `M${said}`;
        area += `M${points[0][0].toFixed(1)},${HEIGHT}L${said}L${points.at(-1)[0].toFixed(1)},${HEIGHT}Z`;
      }
      run = [];
    };
    values.forEach((value, i) => {
      if (value === undefined) finish();
      else run.push([(i + 1) * width, HEIGHT - 1 - (HEIGHT - 2) * Math.min(1, value)]);
    });
    finish();
    this.line.setAttribute("d", line);
    this.area.setAttribute("d", area);
  }
}
