// Elements, and how numbers and times read. All text becomes text nodes: nothing from the network is parsed as HTML.

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// Makes `old` read like `next` and touches only what differs, so that focus, selection and scrolling survive a refresh.
// The children of an element with `data-kept` belong to somebody else.
export function patch(old, next) {
  if (old.nodeName !== next.nodeName || old.id !== next.id) return old.replaceWith(next);
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== next.data) old.data = next.data;
    return;
  }
  for (const name of old.getAttributeNames()) if (!next.hasAttribute(name)) old.removeAttribute(name);
  for (const name of next.getAttributeNames()) {
    if (old.getAttribute(name) !== next.getAttribute(name)) old.setAttribute(name, next.getAttribute(name));
  }
  if (old.dataset.kept !== undefined) return;
  const ours = [...old.childNodes];
  const theirs = [...next.childNodes];
  theirs.forEach((child, i) => (ours[i] ? patch(ours[i], child) : old.append(child)));
  ours.slice(theirs.length).forEach((child) => child.remove());
}

// Columns: [heading, cell of row, class]; a cell is text or an element.
export function table(label, columns, rows, key) {
  const head = columns.map(([heading, , kind]) => h("th", { scope: "col", class: kind }, heading));
  const body = rows.map((row) =>
    h("tr", { "data-row": key(row) }, columns.map(([, cell, kind]) => h("td", { class: kind }, cell(row) ?? "–"))),
  );
  return h(
    "div",
    { class: "scroll", role: "region", "aria-label": label, tabindex: "0" },
    h("table", {}, h("caption", {}, label), h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)),
  );
}

const SIGNS = {
  pending: "○", starting: "◔", running: "▶", paused: "‖", stopping: "◨", succeeded: "✓", stopped: "■", failed: "✗",
  online: "●", lost: "✗", left: "○",
};

export function badge(status) {
  const sign = h("span", { "aria-hidden": "true" }, SIGNS[status] ?? "·");
  return h("span", { class: `badge ${status}`, "data-status": status }, sign, " ", status);
}

export function when(text) {
  const time = new Date(text);
  const seconds = Math.max(0, (Date.now() - time) / 1000);
  return h("time", { datetime: text, title: time.toLocaleString() }, seconds < 5 ? "just now" : `${duration(seconds)} ago`);
}

export function duration(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 129600) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

export function count(number) {
  return number.toLocaleString("en");
}

export function bytes(number) {
  if (number === null || number === undefined) return null;
  const power = number < 1000 ? 0 : Math.min(4, Math.floor(Math.log10(number) / 3));
  const scaled = number / 1000 ** power;
  return `${power && scaled < 100 ? scaled.toPrecision(3) : Math.round(scaled)} ${["B", "kB", "MB", "GB", "TB"][power]}`;
}
