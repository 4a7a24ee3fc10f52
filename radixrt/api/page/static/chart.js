/** A line chart of the last minutes, as SVG. */

import { element } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 150;
const LEFT = 54;
const BOTTOM = 18;
const TOP = 8;
/** Of the time axis: it grows with the points, up to the last of these. */
const WINDOWS_S = [60, 120, 300];

/** @typedef {{name: string, style: string}} Series `style`: the class that colours it */

/** @param {string} name @param {Object<string, any>} attributes @param {...Node} children */
function svg(name, attributes, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  made.append(...children);
  return made;
}

/** The least of 1, 2, 4 times a power of ten that is not below a value. @param {number} value */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 10].map((step) => step * power).find((bound) => bound >= value * 0.9999) ?? value;
}

export class Chart {
  /**
   * @param {string} title
   * @param {Series[]} series
   * @param {(value: number) => string} format of values
   * @param {{stacked?: boolean, logarithmic?: boolean, top?: number, least?: number}} [options] `stacked`: areas on each other; `logarithmic`:
   *   values of every size are seen beside each other; `top`: end of the scale, if it is fixed; `least`: least end of the scale
   */
  constructor(title, series, format, { stacked = false, logarithmic = false, top = 0, least = 1e-9 } = {}) {
    Object.assign(this, { title, series, format, stacked, logarithmic, top, least });
    /** @type {{time: number, values: (number|null)[]}[]} */
    this.points = [];
    this.pointer = null;
    this.values = series.map(() => element("b", { text: "–" }));
    this.drawing = svg("svg", { role: "img", class: "plot", height: HEIGHT });
    const legend = series.map(({ name, style }, index) => element("li", { class: `swatch ${style}` }, `${name} `, this.values[index]));
    if (logarithmic) legend.push(element("li", { text: "logarithmic scale" }));
    this.root = element("figure", { class: "chart" },
      element("figcaption", {}, element("h2", { text: title }), element("ul", { class: "legend" }, ...legend)), this.drawing);
    this.drawing.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.drawing.addEventListener("pointerleave", () => this.point(null));
    new ResizeObserver(() => this.draw()).observe(this.root);
  }

  /** @param {number} time in seconds @param {(number|null)[]} values one a series; null: unknown */
  add(time, values) {
    this.points.push({ time, values });
    while (this.points[0].time < time - WINDOWS_S.at(-1)) this.points.shift();
    this.draw();
  }

  clear() {
    this.points = [];
    this.draw();
  }

  /** @param {number|null} x of the pointer */
  point(x) {
    this.pointer = x;
    this.draw();
  }

  draw() {
    const width = this.drawing.clientWidth;
    if (!width) return; // not shown
    const now = this.points.at(-1)?.time ?? 0;
    const age = now - (this.points[0]?.time ?? now);
    const span = WINDOWS_S.find((seconds) => age <= seconds) ?? WINDOWS_S.at(-1);
    const x = (time) => LEFT + (width - LEFT - 2) * (1 - (now - time) / span);
    const sums = this.points.map(({ values }) => (this.stacked ? values.reduce((sum, value) => sum + (value ?? 0), 0) : Math.max(...values.map((value) => value ?? 0))));
    const largest = Math.max(this.least, ...sums);
    const decades = Math.max(1, Math.ceil(Math.log10(largest)));
    const top = this.top || (this.logarithmic ? 10 ** decades : roundUp(largest));
    const share = (value) => (this.logarithmic ? Math.log1p(value) / Math.log1p(top) : value / top);
    const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - share(value));
    const parts = [];
    const ticks = this.logarithmic ? [0, ...Array.from({ length: decades }, (_, power) => 10 ** (power + 1))] : [0, top / 2, top];
    for (const tick of ticks) {
      parts.push(svg("line", { class: "grid", x1: LEFT, x2: width, y1: y(tick), y2: y(tick) }));
      parts.push(label(this.points.length ? this.format(tick) : "", LEFT - 6, y(tick) + 4, "end"));
    }
    for (const [seconds, text] of [[span, `−${span / 60} min`], [0, "now"]]) {
      parts.push(label(text, x(now - seconds), HEIGHT - 3, seconds ? "start" : "end"));
    }
    const floors = this.points.map(() => 0);
    this.series.forEach(({ style }, index) => parts.push(...this.curve(style, index, x, y, floors)));
    const shown = this.pointed(x);
    if (shown && this.pointer !== null) parts.push(svg("line", { class: "cursor", x1: x(shown.time), x2: x(shown.time), y1: TOP, y2: HEIGHT - BOTTOM }));
    this.values.forEach((place, index) => {
      const value = shown?.values[index];
      place.textContent = value == null ? "–" : this.format(value);
    });
    this.drawing.setAttribute("aria-label", `${this.title}: ${this.series.map(({ name }, index) => `${name} ${this.values[index].textContent}`).join(", ")}`);
    this.drawing.replaceChildren(...parts);
  }

  /** The point under the pointer, or the last one. */
  pointed(x) {
    if (this.pointer === null) return this.points.at(-1);
    return this.points.reduce((best, one) => (!best || Math.abs(x(one.time) - this.pointer) < Math.abs(x(best.time) - this.pointer) ? one : best), null);
  }

  /** One series: a line with gaps, or an area on `floors`, which it raises. */
  curve(style, index, x, y, floors) {
    if (this.stacked) {
      const below = this.points.map(({ time }, i) => `${x(time)},${y(floors[i])}`);
      const above = this.points.map(({ time, values }, i) => `${x(time)},${y((floors[i] += values[index] ?? 0))}`);
      return [svg("polygon", { class: `area ${style}`, points: [...above, ...below.reverse()].join(" ") })];
    }
    let path = "";
    let pen = "M";
    for (const { time, values } of this.points) {
      const value = values[index];
      if (value !== null) path += `${pen}${x(time).toFixed(1)},${y(value).toFixed(1)}`;
      pen = value === null ? "M" : "L";
    }
    return [svg("path", { class: `line ${style}`, d: path })];
  }
}

function label(text, x, y, anchor) {
  const made = svg("text", { x, y, "text-anchor": anchor });
  made.textContent = text;
  return made;
}
