/** Nodes. Text goes in as text, so that no name of a tenant's can be anything else. */

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** A new element with these attributes (`text`: what it says) and children. */
export function el(name, attributes = {}, ...children) {
  return made(document.createElement(name), attributes, children);
}

/** The same inside a picture. */
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

/** Says something else, if it is something else. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Sets an attribute, if it is another one. */
export function put(node, name, value) {
  const text = String(value);
  if (node.getAttribute(name) !== text) node.setAttribute(name, text);
}

/** Sets a custom property, through the object model: the policy of the page allows no style in attributes. */
export function style(node, name, value) {
  if (node.style.getPropertyValue(name) !== value) node.style.setProperty(name, value);
}

/** A list that keeps a node for each key, in order, and forgets those that are gone. */
export class Rows {
  constructor(host, make) {
    this.host = host;
    this.make = make;
    this.known = new Map();
  }

  /** Has one row for every item; each is an object of nodes with `root`. */
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
