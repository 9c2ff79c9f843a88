/** DOM helpers. Text is inserted as text nodes, so that names of tenants cannot inject markup. */

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** Creates an element with these attributes (`text`: its content) and children. */
export function el(name, attributes = {}, ...children) {
  return made(document.createElement(name), attributes, children);
}

/** Creates an SVG element. */
export function svg(name, attributes = {}, ...children) {
  return made(document.createElementNS(SVG, name), attributes, children);
}

function made(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "text") node.textContent = value;
    else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

/** Sets a node's text if it differs. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Sets an attribute if it differs. */
export function put(node, name, value) {
  const text = String(value);
  if (node.getAttribute(name) !== text) node.setAttribute(name, text);
}

/** Sets a custom property by the object model: the content security policy forbids style attributes. */
export function style(node, name, value) {
  if (node.style.getPropertyValue(name) !== value) node.style.setProperty(name, value);
}

/** A list with one node per key, in order. Removes nodes of keys that are gone. */
export class Rows {
  constructor(host, make) {
    this.host = host;
    this.make = make;
    this.known = new Map();
  }

  /** Shows one row per item; each row is an object of nodes with `root`. */
  update(items, key, fill) {
    const wanted = new Set(items.map(key));
    for (const [name, row] of this.known) {
      if (!wanted.has(name)) {
        row.root.remove();
        this.known.delete(name);
      }
    }
    let before = null;
    for (const item of items) {
      const name = key(item);
      let row = this.known.get(name);
      if (!row) {
        row = this.make(item);
        this.known.set(name, row);
      }
      const place = before ? before.nextSibling : this.host.firstChild;
      if (place !== row.root) this.host.insertBefore(row.root, place);
      before = row.root;
      fill(row, item);
    }
  }
}
