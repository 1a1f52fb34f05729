// The recent utilisation of every device, one byte per time step, and its sparklines. Starts with the server's history
// (api/v1/history) or, if there is none, when the page is opened.

import { svg } from "./dom.js";

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

  // Discards all values and starts with `kept`, the answer of api/v1/history. Returns false if it has almost no values.
  seed(kept) {
    const step = Number(kept.step_seconds);
    const slots = Number(kept.points);
    if (!(step > 0) || !(slots > 1) || slots > MOST_SLOTS) return false;
    const seeds = new Map(Object.entries(kept.devices ?? {}));
    const empty = emptyAtFirst(seeds, slots);
    if (slots - empty < FEWEST_STEPS) return false;
    this.start(slots, step);
    this.seeds = seeds;
    this.seededFrom = Math.round(Number(kept.from) / step);
    this.first = this.seededFrom + empty;
    return true;
  }

  // `time` is the current time by the server's clock.
  add(time, devices) {
    this.turnTo(Math.floor(time / this.step));
    for (const device of devices) {
      this.put(device.key, device.utilization);
      if (device.holders.length < 2) continue;
      for (const holder of device.holders)
        this.put(holderKey(device, holder), ownUtilization(device, holder));
    }
    for (const [key, ring] of this.rings) {
      if (this.number - ring.seen > this.slots) this.rings.delete(key);
    }
  }

  // Moves to step `number` and clears the steps that were skipped. If the clock was set back, discards all values.
  turnTo(number) {
    const passed = this.number === undefined ? 0 : number - this.number;
    if (passed < 0) this.start(this.slots, this.step); // the server's values have their own times, so they are kept
    if (passed > 0 && this.rings.size) {
      const empty = Math.min(passed, this.slots);
      for (const ring of this.rings.values()) {
        for (let i = 0; i < empty; i += 1) ring.values[(number - i) % this.slots] = NONE;
      }
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
    if (ring.number !== this.number) [ring.sum, ring.count, ring.number] = [0, 0, this.number];
    ring.sum += value;
    ring.count += 1;
    ring.values[this.number % this.slots] = Math.min(
      SCALE,
      Math.round((ring.sum / ring.count) * SCALE),
    );
  }

  // Returns a ratio or undefined for each step, oldest first. A value is valid for `interval`, the time between
  // readings.
  ofDevice(device, interval) {
    const kept = this.kept(device.uuid) ?? this.keptOfParts(device);
    return this.drawn(this.rings.get(device.key), interval, kept);
  }

  ofHolder(device, holder, interval) {
    const isSole = holder.part?.ownHolders.length === 1; // its use is that of its instance
    return this.drawn(
      this.rings.get(holderKey(device, holder)),
      interval,
      isSole ? this.kept(`${device.uuid}/${holder.part.id}`) : undefined,
    );
  }

  // Returns the values to draw. Steps that this tab did not record are taken from the server's history.
  drawn(ring, interval, kept) {
    if (!ring && !kept) return [];
    const longest = Math.ceil((2 * interval) / this.step);
    let held;
    let since = 0;
    const length = Math.min(this.slots, Math.max(SHORTEST_LINE, this.number - this.first + 1));
    return Array.from({ length }, (_, i) => {
      const number = this.number - length + 1 + i;
      let byte = ring?.values[number % this.slots] ?? NONE;
      if (byte === NONE) byte = kept?.[number - this.seededFrom] ?? NONE;
      since = byte === NONE ? since + 1 : 0;
      if (byte !== NONE) held = Math.min(1, byte / SCALE);
      return since > longest ? undefined : held;
    });
  }

  // Returns the server's values of a device. Decoded only when drawn, because there may be thousands of devices.
  kept(key) {
    return bytesOf(this.seeds.get(key));
  }

  // A GPU in MIG mode has no utilisation of its own: uses the mean of its instances, weighted by compute slices.
  keptOfParts(device) {
    const rows = device.parts
      .map((part) => [this.kept(`${device.uuid}/${part.id}`), part.weight])
      .filter(([row]) => row);
    if (!rows.length) return undefined;
    return Uint8Array.from({ length: this.slots }, (_, i) => {
      const known = rows.filter(([row]) => (row[i] ?? NONE) !== NONE);
      const weights = known.reduce((sum, [, weight]) => sum + weight, 0);
      return weights
        ? Math.round(known.reduce((sum, [row, weight]) => sum + row[i] * weight, 0) / weights)
        : NONE;
    });
  }
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
    const known = bytesOf(text)?.findIndex((byte) => byte !== NONE) ?? -1;
    if (known >= 0) fewest = Math.min(fewest, known);
  }
  return fewest;
}

function holderKey(device, holder) {
  return `${device.key} ${holder.part?.id ?? ""} ${holder.name} ${holder.container}`;
}

export function ownUtilization(device, holder) {
  if (holder.utilization !== undefined) return holder.utilization;
  if (holder.part) return holder.part.ownHolders.length === 1 ? holder.part.utilization : undefined;
  return device.holders.length === 1 ? device.utilization : undefined;
}

export function ownMemory(device, holder) {
  if (holder.memory !== undefined) return holder.memory;
  if (holder.part) return holder.part.ownHolders.length === 1 ? holder.part.memoryUsed : undefined;
  return device.holders.length === 1 ? device.memoryUsed : undefined;
}

export function ownPower(device, holder) {
  if (holder.power !== undefined) return holder.power;
  if (holder.part) return holder.part.ownHolders.length === 1 ? holder.part.power : undefined;
  return device.holders.length === 1 ? device.power : undefined;
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
    let line = "";
    let area = "";
    let run = [];
    const finish = () => {
      if (run.length) {
        const points = run.length > 1 ? run : [[run[0][0] - width, run[0][1]], run[0]];
        const coordinates = points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join("L");
        line += `M${coordinates}`;
        area += `M${points[0][0].toFixed(1)},${HEIGHT}L${coordinates}L${points.at(-1)[0].toFixed(1)},${HEIGHT}Z`;
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
