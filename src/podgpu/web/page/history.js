// The recent utilisation of every device, one byte per time step, and its sparklines. Starts with
// the server's history (api/v1/history) or, if there is none, when the page is opened.

import { svg } from "./dom.js";
import { areaOf, pointsText, runsOf } from "./shapes.js";

const NONE = 255;
const SCALE = 200; // encoding of the server: a byte is round(ratio * 200)
const OWN_SLOTS = 120;
const OWN_STEP = 5;
const MOST_SLOTS = 1000;
const FEWEST_STEPS = 5; // with fewer steps, the server's history is not used
const SHORTEST_LINE = 24; // a line has at least this many steps
const LOOKED_AT = 200; // number of devices that are searched for the oldest value
const WIDTH = 120;
const HEIGHT = 28;

// All rings use the same index: slot `number % slots` is time step `number` since the epoch.
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
    this.first = undefined; // the oldest step with a value
  }

  // Discards all values and starts with `recorded`, the answer of api/v1/history. Returns false if
  // it has almost no values.
  seed(recorded) {
    const step = Number(recorded.step_seconds);
    const slots = Number(recorded.points);
    const isValid = step > 0 && slots > 1 && slots <= MOST_SLOTS;
    if (!isValid) return false;

    const seeds = new Map(Object.entries(recorded.devices ?? {}));
    const empty = emptyAtFirst(seeds, slots);
    if (slots - empty < FEWEST_STEPS) return false;

    this.start(slots, step);
    this.seeds = seeds;
    this.seededFrom = Math.round(Number(recorded.from) / step);
    this.first = this.seededFrom + empty;
    return true;
  }

  // `time` is the current time by the server's clock.
  add(time, devices) {
    this.turnTo(Math.floor(time / this.step));
    for (const device of devices) {
      this.put(device.key, device.utilization);
      // The use of a sole holder is that of its GPU.
      if (device.holders.length < 2) continue;
      for (const holder of device.holders) {
        this.put(holderKey(device, holder), ownUtilization(device, holder));
      }
    }
    for (const [key, ring] of this.rings) {
      if (this.number - ring.seen > this.slots) this.rings.delete(key);
    }
  }

  // Moves to step `number` and clears the steps that were skipped. If the clock was set back,
  // discards all values except the server's, which have their own times.
  turnTo(number) {
    const passed = this.number === undefined ? 0 : number - this.number;
    if (passed < 0) this.start(this.slots, this.step);

    const skipped = Math.min(passed, this.slots);
    for (const ring of this.rings.values()) {
      for (let i = 0; i < skipped; i += 1) ring.values[(number - i) % this.slots] = NONE;
    }
    this.number = number;
    this.first ??= number;
  }

  // The value of a step is the mean of its readings.
  put(key, value) {
    let ring = this.rings.get(key);
    if (!ring) {
      if (value === undefined) return;
      ring = { values: new Uint8Array(this.slots).fill(NONE), sum: 0, count: 0 };
      this.rings.set(key, ring);
    }
    ring.seen = this.number;
    if (value === undefined) return;
    if (ring.number !== this.number) {
      ring.number = this.number;
      ring.sum = 0;
      ring.count = 0;
    }
    ring.sum += value;
    ring.count += 1;
    const mean = Math.round((ring.sum / ring.count) * SCALE);
    ring.values[this.number % this.slots] = Math.min(SCALE, mean);
  }

  // Returns a ratio or undefined for each step, oldest first. A value is valid for `interval`, the
  // time between readings.
  ofDevice(device, interval) {
    const recorded = this.recorded(device.uuid) ?? this.recordedOfParts(device);
    return this.drawn(this.rings.get(device.key), interval, recorded);
  }

  ofHolder(device, holder, interval) {
    const ring = this.rings.get(holderKey(device, holder));
    // The use of a sole holder is that of its instance.
    const isSole = holder.part?.ownHolders.length === 1;
    const recorded = isSole ? this.recorded(partKey(device, holder.part)) : undefined;
    return this.drawn(ring, interval, recorded);
  }

  // Returns the values to draw. Steps that this tab did not record are taken from the server's
  // history. A gap between two readings is filled with the value before it.
  drawn(ring, interval, recorded) {
    if (!ring && !recorded) return [];
    const longestGap = Math.ceil((2 * interval) / this.step);
    const length = Math.min(this.slots, Math.max(SHORTEST_LINE, this.number - this.first + 1));
    const values = [];
    let last;
    let gap = 0;
    for (let number = this.number - length + 1; number <= this.number; number += 1) {
      let byte = ring?.values[number % this.slots] ?? NONE;
      if (byte === NONE) byte = recorded?.[number - this.seededFrom] ?? NONE;
      if (byte === NONE) {
        gap += 1;
      } else {
        gap = 0;
        last = Math.min(1, byte / SCALE);
      }
      values.push(gap > longestGap ? undefined : last);
    }
    return values;
  }

  // Returns the server's values of a device. Decoded only when drawn, because there may be
  // thousands of devices.
  recorded(key) {
    return bytesOf(this.seeds.get(key));
  }

  // A GPU in MIG mode has no utilisation of its own: uses the mean of its instances, weighted by
  // compute slices.
  recordedOfParts(device) {
    const rows = [];
    for (const part of device.parts) {
      const bytes = this.recorded(partKey(device, part));
      if (bytes) rows.push({ bytes, weight: part.weight });
    }
    if (!rows.length) return undefined;
    return Uint8Array.from({ length: this.slots }, (_, i) => meanByte(rows, i));
  }
}

function meanByte(rows, i) {
  let sum = 0;
  let weights = 0;
  for (const { bytes, weight } of rows) {
    const byte = bytes[i] ?? NONE;
    if (byte === NONE) continue;
    sum += byte * weight;
    weights += weight;
  }
  return weights ? Math.round(sum / weights) : NONE;
}

function bytesOf(text) {
  if (typeof text !== "string") return undefined;
  try {
    return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  } catch {
    return undefined; // invalid base64
  }
}

// Returns the number of leading steps without data.
function emptyAtFirst(seeds, slots) {
  let fewest = slots;
  for (const text of [...seeds.values()].slice(0, LOOKED_AT)) {
    const firstKnown = bytesOf(text)?.findIndex((byte) => byte !== NONE) ?? -1;
    if (firstKnown >= 0) fewest = Math.min(fewest, firstKnown);
  }
  return fewest;
}

function holderKey(device, holder) {
  return `${device.key} ${holder.part?.id ?? ""} ${holder.name} ${holder.container}`;
}

// The key of an instance in the answer of api/v1/history.
function partKey(device, part) {
  return `${device.uuid}/${part.id}`;
}

export function ownUtilization(device, holder) {
  return holder.utilization ?? soleHeld(device, holder)?.utilization;
}

export function ownMemory(device, holder) {
  return holder.memory ?? soleHeld(device, holder)?.memoryUsed;
}

export function ownPower(device, holder) {
  return holder.power ?? soleHeld(device, holder)?.power;
}

// Returns the instance or GPU whose values are those of the holder, because it has no other holder.
function soleHeld(device, holder) {
  if (holder.part) return holder.part.ownHolders.length === 1 ? holder.part : undefined;
  return device.holders.length === 1 ? device : undefined;
}

export class Sparkline {
  constructor(label) {
    this.area = svg("path", { class: "spark-area" });
    this.line = svg("path", { class: "spark-line" });
    const box = { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none" };
    this.element = svg("svg", { ...box, role: "img", "aria-label": label }, this.area, this.line);
  }

  // Draws one value per step, oldest first. A single value is a short dash.
  draw(values) {
    const width = WIDTH / values.length;
    const x = (i) => (i + 1) * width;
    const y = (value) => HEIGHT - 1 - (HEIGHT - 2) * Math.min(1, value);
    let line = "";
    let area = "";
    for (const run of runsOf(values, x, y)) {
      if (run.length === 1) run.unshift({ x: run[0].x - width, y: run[0].y });
      const points = pointsText(run, 1);
      line += `M${points}`;
      area += areaOf(run, points, HEIGHT);
    }
    this.line.setAttribute("d", line);
    this.area.setAttribute("d", area);
  }
}
