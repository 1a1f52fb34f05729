// The filter row: the options come from the data, the selection from the address.

import { choicesOf, isFiltered, NAMES, SHOWS } from "./criteria.js";
import { byId, h, place, plain, setText } from "./dom.js";

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
      const value = target.type === "checkbox" ? (target.checked ? "1" : "") : target.value;
      onChange({ [target.name]: value }, target.type === "search");
    });
    this.form.addEventListener("submit", (event) => event.preventDefault());
    byId("more-filters").addEventListener("click", ({ target }) => {
      const open = this.form.classList.toggle("is-open");
      target.setAttribute("aria-expanded", open);
      setText(target, open ? "Less" : "More");
    });
    byId("clear").addEventListener("click", () =>
      onChange({ q: "", cluster: "", ns: "", node: "", model: "", state: "" }),
    );
  }

  offer(name, choices) {
    const written = JSON.stringify(choices);
    if (this.offered[name] === written) return;
    this.offered[name] = written;
    const select = this.form.elements[name];
    const chosen = select.value;
    place(
      select,
      choices.map(([value, text]) => h("option", { value }, plain(text))),
    );
    select.value = chosen;
  }

  // Lists the values of the devices, and the selected value even if no device has it.
  offerFrom(devices, picture, criteria) {
    for (const name of ["state", "sort"]) this.offer(name, choicesOf(name, picture.paged));
    const all = picture.namespaces ?? []; // also those of GPUs that the server did not list
    const namespaces = new Set(all.map((one) => one.namespace));
    const models = new Set();
    for (const device of devices) {
      models.add(device.model);
      for (const holder of device.holders) if (holder.namespace) namespaces.add(holder.namespace);
    }
    const nodes = (picture.nodes ?? []).map((node) => node.name);
    const clusters = new Set(
      [...(picture.nodes ?? []), ...all].map((one) => one.cluster ?? "").filter(Boolean),
    );
    this.form.elements.cluster.closest("label").hidden = !clusters.size;
    this.offer("cluster", choices("cluster", clusters, criteria));
    this.offer("ns", choices("ns", namespaces, criteria));
    this.offer("model", choices("model", models, criteria));
    this.offer("node", choices("node", new Set(nodes), criteria));
    this.form.elements.ns.closest("label").hidden = !namespaces.size && !criteria.ns;
    this.form.elements.node.closest("label").hidden = nodes.length < 2 && !criteria.node;
    this.form.elements.model.closest("label").hidden = models.size < 2 && !criteria.model;
    const priced = devices.some(
      (device) =>
        device.price !== undefined || device.holders.some((holder) => holder.cost !== undefined),
    );
    this.form.elements.cost.closest("label").hidden = !priced;
  }

  show(criteria, view) {
    for (const name of NAMES) {
      const field = this.form.elements[name];
      if (field.value !== criteria[name]) field.value = criteria[name];
    }
    this.form.elements.cost.checked = Boolean(criteria.cost);
    this.form.dataset.view = view || "list"; // the stylesheet hides filters that do not apply to the view
    byId("clear").hidden = !isFiltered(criteria);
  }
}

function choices(of, names, criteria) {
  if (criteria[of]) names.add(criteria[of]);
  const ordered = [...names].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  return [["", ALL[of]], ...ordered.map((name) => [name, name])];
}
