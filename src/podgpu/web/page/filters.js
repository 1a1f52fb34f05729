// The filter row: the options come from the data, the selection from the address.

import { choicesOf, isFiltered, NAMES, SHOWS, without } from "./criteria.js";
import { byId, h, place, plain, setAttribute, setText } from "./dom.js";

const ALL = {
  cluster: "All clusters",
  ns: "All namespaces",
  node: "All nodes",
  model: "All models",
};

export class Filters {
  // `onChange` is called with the changes as {name: value}, and whether the user is still typing.
  constructor(onChange) {
    this.form = byId("filters");
    this.offered = {};
    this.offer("show", SHOWS);
    for (const name of Object.keys(ALL)) this.offer(name, [["", ALL[name]]]);
    this.form.addEventListener("input", ({ target }) => {
      const isTyping = target.type === "search";
      onChange({ [target.name]: valueOf(target) }, isTyping);
    });
    this.form.addEventListener("submit", (event) => event.preventDefault());
    byId("more-filters").addEventListener("click", ({ target }) => {
      const isOpen = this.form.classList.toggle("is-open");
      setAttribute(target, "aria-expanded", String(isOpen));
      setText(target, isOpen ? "Less" : "More");
    });
    byId("clear").addEventListener("click", () => onChange(without({})));
  }

  offer(name, choices) {
    const written = JSON.stringify(choices);
    if (this.offered[name] === written) return;
    this.offered[name] = written;
    const select = this.form.elements[name];
    const chosen = select.value;
    const options = choices.map(([value, text]) => h("option", { value }, plain(text)));
    place(select, options);
    select.value = chosen;
  }

  // Lists the values of the devices, and the selected value even if no device has it.
  offerFrom(devices, picture, criteria) {
    for (const name of ["state", "sort"]) this.offer(name, choicesOf(name, picture.paged));
    const { nodes = [], namespaces: rows = [] } = picture;
    const nodeNames = new Set(nodes.map((node) => node.name));
    const models = new Set(devices.map((device) => device.model));
    const clusters = new Set([...nodes, ...rows].map((row) => row.cluster).filter(Boolean));
    // The rows include namespaces of GPUs that the server did not list.
    const namespaces = new Set(rows.map((row) => row.namespace));
    for (const holder of devices.flatMap((device) => device.holders)) {
      if (holder.namespace) namespaces.add(holder.namespace);
    }

    // A field with one choice is shown only if it is in the address.
    this.hide("cluster", !clusters.size);
    this.hide("ns", !namespaces.size && !criteria.ns);
    this.hide("node", nodeNames.size < 2 && !criteria.node);
    this.hide("model", models.size < 2 && !criteria.model);
    this.hide("cost", !devices.some(hasPrice));
    this.offer("cluster", choices("cluster", clusters, criteria));
    this.offer("ns", choices("ns", namespaces, criteria));
    this.offer("node", choices("node", nodeNames, criteria));
    this.offer("model", choices("model", models, criteria));
  }

  hide(name, isHidden) {
    this.form.elements[name].closest("label").hidden = isHidden;
  }

  show(criteria, view) {
    for (const name of NAMES) {
      const field = this.form.elements[name];
      if (field.value !== criteria[name]) field.value = criteria[name];
    }
    this.form.elements.cost.checked = Boolean(criteria.cost);
    // The stylesheet hides filters that do not apply to the view.
    this.form.dataset.view = view || "list";
    byId("clear").hidden = !isFiltered(criteria);
  }
}

function valueOf(field) {
  if (field.type !== "checkbox") return field.value;
  return field.checked ? field.value : "";
}

function hasPrice(device) {
  if (device.price !== undefined) return true;
  return device.holders.some((holder) => holder.cost !== undefined);
}

function choices(filter, names, criteria) {
  const all = new Set(names);
  if (criteria[filter]) all.add(criteria[filter]);
  const ordered = [...all].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  return [["", ALL[filter]], ...ordered.map((name) => [name, name])];
}
