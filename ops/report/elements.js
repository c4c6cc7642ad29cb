// Elements and numbers. Text becomes text nodes, always: nothing that a run wrote is ever parsed as markup.

const SVG = "http://www.w3.org/2000/svg";

function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function s(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

function byId(id) {
  return document.getElementById(id);
}

function grouped(value) {
  return Math.round(value).toLocaleString("en-US");
}

// A number of a plain quantity: as many digits as tell it apart, no more.
function plain(value) {
  const size = Math.abs(value);
  if (size >= 1000) return grouped(value);
  if (Number.isInteger(value)) return String(value);
  return String(Number(value.toPrecision(size >= 100 ? 4 : 3)));
}

function scaled(value, steps) {
  const [name, divisor] = steps.find(([, least]) => Math.abs(value) >= least) ?? steps.at(-1);
  return `${plain(value / divisor)} ${name}`;
}

const BYTES = [["GB", 1e9], ["MB", 1e6], ["kB", 1e3], ["B", 1]];
const SECONDS = [["h", 3600], ["min", 60], ["s", 1], ["ms", 1e-3]];

// A value with its unit, as the read-outs show it.
function withUnit(value, unit) {
  if (value === null || value === undefined) return "–";
  if (unit === "percent") return `${(100 * value).toFixed(Math.abs(value) > 0 && Math.abs(value) < 0.095 ? 1 : 0)} %`;
  if (unit === "bytes") return value === 0 ? "0 B" : scaled(value, BYTES);
  if (unit === "seconds") return value === 0 ? "0 s" : scaled(value, SECONDS);
  if (unit === "count") return grouped(value);
  if (unit === "number" || unit === "ratio") return plain(value);
  return `${plain(value)} ${value === 1 ? unit.replace(/s$/, "") : unit}`;
}

function reward(value) {
  return Number.isInteger(value) ? String(value) : String(Number(value.toFixed(3)));
}

function ago(seconds) {
  return seconds < 90 ? `${Math.round(seconds)} s` : seconds < 5400 ? `${Math.round(seconds / 60)} min`
    : seconds < 129600 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} days`;
}
