// The last minutes of every device, kept in this tab only, and the lines drawn of them.

import { svg } from "./dom.js";

export const SLOTS = 150;
const WIDTH = 120;
const HEIGHT = 28;

// One time for each picture, shared by all rings; a ring has a value, or NaN, for each of these times.
export class History {
  constructor() {
    this.times = new Float64Array(SLOTS).fill(NaN);
    this.rings = new Map();
    this.at = -1;
    this.turn = 0;
  }

  add(time, devices) {
    this.at = (this.at + 1) % SLOTS;
    this.turn += 1;
    this.times[this.at] = time;
    for (const one of devices) this.note(one);
    for (const [key, ring] of this.rings) {
      if (ring.turn === this.turn) continue;
      ring.values.fill(NaN, this.at, this.at + 1);
      if (this.turn - ring.turn > SLOTS) this.rings.delete(key);
    }
  }

  note(one) {
    this.put(`${one.key} utilization`, one.utilization);
    this.put(`${one.key} memory`, one.memoryUsed);
    this.put(`${one.key} power`, one.power);
    if (one.holders.length > 1) {
      for (const holder of one.holders) this.put(holderKey(one, holder), ownUtilization(one, holder));
    }
  }

  put(key, value) {
    if (value === undefined) return;
    let ring = this.rings.get(key);
    if (!ring) this.rings.set(key, (ring = { values: new Float32Array(SLOTS).fill(NaN), turn: 0 }));
    ring.values[this.at] = value;
    ring.turn = this.turn;
  }

  // Oldest first, as [seconds before the newest, value].
  points(key) {
    const ring = this.rings.get(key);
    const found = [];
    if (!ring) return found;
    const newest = this.times[this.at];
    for (let i = 1; i <= SLOTS; i += 1) {
      const slot = (this.at + i) % SLOTS;
      if (!Number.isNaN(this.times[slot])) found.push([newest - this.times[slot], ring.values[slot]]);
    }
    return found;
  }

  seconds() {
    const first = this.times[(this.at + 1) % SLOTS];
    const known = this.times.filter((t) => !Number.isNaN(t));
    return known.length > 1 ? this.times[this.at] - (Number.isNaN(first) ? Math.min(...known) : first) : 0;
  }
}

export function holderKey(one, holder) {
  return `${one.key} ${holder.part?.id ?? ""} ${holder.name} ${holder.container}`;
}

export function ownUtilization(one, holder) {
  if (holder.utilization !== undefined) return holder.utilization;
  if (holder.part) return holder.part.holders.length === 1 ? holder.part.utilization : undefined;
  return one.holders.length === 1 ? one.utilization : undefined;
}

export class Sparkline {
  constructor(label) {
    this.area = svg("path", { class: "spark-area" });
    this.line = svg("path", { class: "spark-line" });
    const box = { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none" };
    this.element = svg("svg", { ...box, role: "img", "aria-label": label }, this.area, this.line);
  }

  // `most`: what the top edge stands for. `span`: seconds from the left edge to the right one.
  draw(points, span, most, longestGap) {
    let line = "";
    let area = "";
    let run = [];
    const finish = () => {
      if (run.length > 1) {
        line += `M${run.join("L")}`;
        area += `M${run[0][0]},${HEIGHT}L${run.join("L")}L${run.at(-1)[0]},${HEIGHT}Z`;
      }
      run = [];
    };
    let before;
    for (const [ago, value] of points) {
      if (Number.isNaN(value) || (before !== undefined && before - ago > longestGap)) finish();
      if (!Number.isNaN(value) && ago <= span) run.push(place(ago, value, span, most));
      before = ago;
    }
    finish();
    this.line.setAttribute("d", line);
    this.area.setAttribute("d", area);
  }
}

function place(ago, value, span, most) {
  const x = WIDTH * (1 - ago / span);
  const y = HEIGHT - 1 - (HEIGHT - 2) * Math.min(1, value / (most || 1));
  return [x.toFixed(1), y.toFixed(1)];
}
