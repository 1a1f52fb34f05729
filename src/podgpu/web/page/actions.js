// Commands that solve a problem, with a button that copies them. Also the button that removes a
// lost GPU from the page.

import { h, place, plain, showText } from "./dom.js";

const HERE = "your terminal";
const SAFE = /^[\w.:@%+=/-]+$/;

// Returns [where to run it, command] for each step that checks and repairs a GPU.
export function commandsFor(device, hasPods) {
  if (device.gone) return nodeCommands(device.node, [device], hasPods);
  const checks = new Set(device.conditions.flatMap((condition) => condition.checks));
  const gpu = device.index ?? quoted(device.uuid);
  const onNode = `on ${plain(device.node)}`;
  return [
    checks.has("dmesg") && [onNode, "dmesg -T | grep -iE 'xid|nvrm'"],
    checks.has("nvlink") && [onNode, `nvidia-smi nvlink -s -i ${gpu}`],
    device.absent && [onNode, "lspci -d 10de:"],
    ...repairCommands(device.node, [device]),
  ].filter(Boolean);
}

// Returns [where to run it, command] for a node that does not respond, or that has broken GPUs.
export function nodeCommands(name, devices, hasPods) {
  const node = quoted(name);
  const repairs = repairCommands(name, devices);
  const isGone = devices.some((device) => device.gone);
  if (!hasPods && isGone) return [[HERE, `ping -c 3 ${node}`]];
  if (!hasPods) return repairs;
  return [
    [HERE, `kubectl describe node ${node}`],
    [HERE, `kubectl get pods -A -o wide --field-selector spec.nodeName=${node}`],
    ...repairs,
  ];
}

// Merges the repairs of several GPUs of a node. The last command of each puts the GPU or the node
// back into service, so it comes after the others.
function repairCommands(node, devices) {
  const repairs = devices.map((device) => device.repair?.commands ?? []);
  const first = repairs.flatMap((steps) => steps.slice(0, -1));
  const last = repairs.flatMap((steps) => steps.slice(-1));
  const merged = new Map();
  for (const step of [...first, ...last]) {
    const where = step.place === "node" ? `on ${plain(node)}` : HERE;
    merged.set(step.command, [where, step.command]);
  }
  return [...merged.values()];
}

// Text about the pods that the drain of a node evicts.
export function evictedText(devices) {
  const evicted = new Set(devices.flatMap((device) => device.repair?.evicts ?? []));
  if (!evicted.size) return "";
  const pods = [...evicted].sort().map(plain).join(", ");
  return `The drain evicts these pods with GPUs: ${pods}. The dry run lists all pods.`;
}

// Quotes a name for the shell, because names from the cluster may contain any character.
function quoted(text) {
  if (SAFE.test(text)) return text;
  const escaped = plain(text).replaceAll("'", "'\\''");
  return `'${escaped}'`;
}

export class Commands {
  constructor() {
    this.list = h("ul", { class: "commands", "aria-label": "Commands" });
    this.note = h("p", { class: "about" });
    this.element = h("div", {}, this.list, this.note);
    this.written = "";
  }

  show(commands, note = "") {
    this.element.hidden = !commands.length;
    showText(this.note, note);
    const written = JSON.stringify(commands);
    if (written === this.written) return;
    this.written = written;
    place(this.list, commands.map(commandLine));
  }
}

function commandLine([where, command]) {
  const title = h("span", { class: "command-where" }, where);
  const copyIt = copyButton("Copy", () => command);
  return h("li", {}, title, h("code", {}, command), copyIt);
}

// `textOf()` returns what is copied.
export function copyButton(name, textOf) {
  return reportingButton(name, async () => {
    const isCopied = await copy(textOf());
    return isCopied ? "Copied" : "Could not copy";
  });
}

// Sends the server a request to forget removed GPUs. The server rejects requests from other
// machines or through a proxy. In that case, shows the commands that do the same on the node.
export class ForgetButton {
  // `target()` returns the UUIDs of the GPUs, and their node.
  constructor(name, target) {
    this.about = h("p", { role: "status" });
    this.commands = new Commands();
    this.button = reportingButton(name, () => this.forget(target()));
    this.element = h("div", { class: "forget" }, this.button, this.about, this.commands.element);
    this.clear();
  }

  clear() {
    this.report("");
    this.commands.show([]);
  }

  // Returns the text that the button shows.
  async forget({ uuids, node }) {
    this.clear();
    for (const uuid of uuids) {
      const response = await sendForget(uuid);
      if (!response) return this.report("No answer from the server");
      if (response.ok) continue;
      const reason = plain((await response.text()).trim());
      if (response.status === 403) return this.refer(reason, uuids, node);
      return this.report(reason || "No answer from the server");
    }
    return "Forgotten";
  }

  report(text) {
    this.about.textContent = text;
    return "Not forgotten";
  }

  refer(why, uuids, node) {
    this.commands.show(uuids.map((uuid) => [`on ${plain(node)}`, `podgpu forget ${quoted(uuid)}`]));
    return this.report(
      `The server refuses this (${why}). Run on the node, or where podgpu cluster runs with --url:`,
    );
  }
}

// Returns the response; undefined if there is none.
async function sendForget(uuid) {
  const headers = { "X-Podgpu-Request": "forget" };
  try {
    return await fetch(`-/forget?gpu=${encodeURIComponent(uuid)}`, { method: "POST", headers });
  } catch {
    return undefined;
  }
}

// Makes a button that calls `act` and shows the returned text for a moment.
function reportingButton(name, act) {
  const button = h("button", { type: "button", class: "quiet", "aria-live": "polite" }, name);
  button.addEventListener("click", async () => {
    const text = await act();
    button.textContent = text;
    const readingMs = Math.max(2000, 80 * text.length);
    setTimeout(() => (button.textContent = name), readingMs);
  });
  return button;
}

// Returns whether the text was copied. The clipboard API needs TLS or localhost. Otherwise, uses
// the deprecated copy command.
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = h("textarea", { class: "announced", "aria-hidden": "true" });
    field.value = text;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    return done;
  }
}
