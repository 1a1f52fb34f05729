// Commands that solve a problem, with a button that copies them. Also the button that removes a lost GPU from the page.

import { h, place, plain } from "./dom.js";
import { showText } from "./rows.js";

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
  if (!hasPods)
    return devices.some((device) => device.gone) ? [[HERE, `ping -c 3 ${node}`]] : repairs;
  return [
    [HERE, `kubectl describe node ${node}`],
    [HERE, `kubectl get pods -A -o wide --field-selector spec.nodeName=${node}`],
    ...repairs,
  ];
}

// Merges the repairs of several GPUs of a node. The last command of each puts the GPU or the node back into service.
function repairCommands(node, devices) {
  const repairs = devices.map((device) => device.repair?.commands ?? []);
  const merged = new Map();
  for (const { place: where, command } of [
    ...repairs.flatMap((steps) => steps.slice(0, -1)),
    ...repairs.flatMap((steps) => steps.slice(-1)),
  ]) {
    merged.set(command, [where === "node" ? `on ${plain(node)}` : HERE, command]);
  }
  return [...merged.values()];
}

// Text about the pods that the drain of a node evicts.
export function evictedText(devices) {
  const pods = [...new Set(devices.flatMap((device) => device.repair?.evicts ?? []))].sort();
  return pods.length
    ? `The drain evicts these pods with GPUs: ${pods.map(plain).join(", ")}. The dry run lists all pods.`
    : "";
}

// Quotes a name for the shell, because names from the cluster may contain any character.
function quoted(text) {
  return SAFE.test(text) ? text : `'${plain(text).replaceAll("'", "'\\''")}'`;
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
    place(
      this.list,
      commands.map(([where, command]) => {
        const copy = copyButton("Copy", () => command);
        return h(
          "li",
          {},
          h("span", { class: "command-where" }, where),
          h("code", {}, command),
          copy,
        );
      }),
    );
  }
}

// `text()` returns what is copied.
export function copyButton(name, text) {
  return reportingButton(name, async () => ((await copied(text())) ? "Copied" : "Could not copy"));
}

// Sends the server a request to forget removed GPUs. The server rejects requests from other machines or through a proxy.
// In that case, shows the commands that do the same on the node.
export class ForgetButton {
  // `target()` returns the UUIDs of the GPUs, and their node.
  constructor(name, target) {
    this.about = h("p", { role: "status" });
    this.commands = new Commands();
    this.button = reportingButton(name, async () => {
      const { uuids, node } = target();
      this.clear();
      for (const uuid of uuids) {
        const headers = { "X-Podgpu-Request": "forget" };
        const response = await fetch(`-/forget?gpu=${encodeURIComponent(uuid)}`, {
          method: "POST",
          headers,
        }).catch(() => undefined);
        if (response?.status === 403)
          return this.refer(plain((await response.text()).trim()), uuids, node);
        if (!response?.ok)
          return this.report(
            plain((await response?.text())?.trim() || "No answer from the server"),
          );
      }
      return "Forgotten";
    });
    this.element = h("div", { class: "forget" }, this.button, this.about, this.commands.element);
    this.clear();
  }

  clear() {
    this.report("");
    this.commands.show([]);
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

// Makes a button that calls `act` and shows the returned text for a moment.
function reportingButton(name, act) {
  const button = h("button", { type: "button", class: "quiet", "aria-live": "polite" }, name);
  button.addEventListener("click", async () => {
    const text = await act();
    button.textContent = text;
    setTimeout(() => (button.textContent = name), Math.max(2000, 80 * text.length));
  });
  return button;
}

// The clipboard API needs TLS or localhost. Otherwise, uses the deprecated copy command.
async function copied(text) {
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
