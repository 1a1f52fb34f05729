// Creates elements without parsing HTML: every text becomes a text node.

const SVG = "http://www.w3.org/2000/svg";
// Control characters and direction overrides could hide or reverse the text next to them.
const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

export function plain(text) {
  return String(text).replace(UNSEEN, "\ufffd");
}

export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(name, "");
    else if (value !== undefined && value !== false) element.setAttribute(name, value);
  }
  for (const child of children) {
    if (child !== undefined && child !== null) element.append(child);
  }
  return element;
}

// Writes only changes, because unchanged nodes need no style or layout work.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttribute(element, name, value) {
  if (value === undefined || value === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

export function setClass(element, name) {
  if (element.className !== name) element.className = name;
}

// Returns the names of the classes that apply, as in classes("row", isFree && "row-free").
export function classes(...names) {
  return names.filter(Boolean).join(" ");
}

// Hides an element that has no text.
export function showText(element, text) {
  element.hidden = !text;
  setText(element, text);
}

// Replaces the children of `parent` with as few moves as possible, so that focus and scroll
// position are kept.
export function place(parent, children) {
  const wanted = new Set(children);
  for (const child of [...parent.children]) {
    if (!wanted.has(child)) child.remove();
  }
  let next = parent.firstElementChild;
  for (const child of children) {
    if (child === next) next = next.nextElementSibling;
    else parent.insertBefore(child, next);
  }
}

// A row of links, of which one is the current choice.
export function tabs(label, links = []) {
  return h("nav", { class: "tabs", "aria-label": label }, ...links);
}

// `current`: what assistive technology calls the chosen link.
export function setTab(link, href, isChosen, current = "page") {
  setAttribute(link, "href", href);
  setAttribute(link, "aria-current", isChosen && current);
}

// Returns the text with its `commands` as code.
export function coded(text) {
  return plain(text)
    .split("`")
    .map((part, i) => {
      const isCommand = i % 2 === 1;
      return isCommand ? h("code", {}, part) : part;
    });
}

/** @returns {any} an element of index.html; the compiler does not know its type */
export function byId(id) {
  return document.getElementById(id);
}

// A name and its value, for a description list.
export function fact(title, content) {
  return h("div", {}, h("dt", {}, title), h("dd", {}, content));
}
