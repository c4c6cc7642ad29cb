// Small charts of the run against its steps. All share one crosshair, so that a step can be read across them.

const EDGE = { left: 70, right: 12, top: 10, bottom: 40 };
const charts = [];
let pointed = null;

function point(step) {
  if (step === pointed) return;
  pointed = step;
  for (const chart of charts) chart.point(step);
}

class Chart {
  constructor(curve, domain, open) {
    this.curve = curve;
    this.domain = domain;
    this.readout = h("span", { class: "readout" });
    this.plot = h("div", { class: "plot", tabindex: 0, role: "img" });
    this.values = curve.series.map(() => h("span", { class: "value" }));
    this.judged = h("span", { class: "value" });
    this.many = curve.series.length !== 1 || Boolean(curve.evaluations?.length);
    this.element = h("figure", { class: curve.wide ? "curve wide" : "curve" },
      h("figcaption", {}, h("b", {}, curve.title), this.readout), this.plot, this.many ? this.legend() : null);
    this.plot.addEventListener("pointermove", (event) => point(this.nearest(event.offsetX)));
    this.plot.addEventListener("pointerleave", () => point(null));
    this.plot.addEventListener("blur", () => point(null));
    this.plot.addEventListener("click", () => pointed !== null && open(pointed));
    this.plot.addEventListener("keydown", (event) => this.key(event, open));
    new ResizeObserver(() => this.draw()).observe(this.plot);
    this.renew(curve, domain);
  }

  // Take what the run has come to since; the next frame has it, and the crosshair stays.
  renew(curve, domain) {
    [this.curve, this.domain] = [curve, domain];
    this.plot.setAttribute("aria-label", this.said());
    this.steps = [...new Set(curve.series.flatMap((series) => series.x).concat((curve.evaluations ?? []).map((one) => one.version)))].sort((a, b) => a - b);
    this.width = null;
    this.draw();
    this.point(pointed);
  }

  // Whether a curve has the same legend as this one.
  fits(curve) {
    const names = ({ title, series, evaluations }) => JSON.stringify([title, series.map(({ name, low }) => [name, Boolean(low)]), Boolean(evaluations?.length)]);
    return names(this.curve) === names(curve);
  }

  said() {
    const ends = this.curve.series.map(({ name, y }) =>
      `${name} from ${withUnit(y[0], this.curve.unit)} to ${withUnit(y.at(-1), this.curve.unit)}`);
    return `${this.curve.title} (${this.curve.axis}) by optimizer step: ${ends.join("; ")}`;
  }

  legend() {
    const marks = this.curve.series.map(({ name, colour }, at) => h("span", {}, h("i", { class: `line c${colour ?? at}` }), name, this.values[at]));
    if (this.curve.evaluations?.length) marks.push(h("span", {}, h("i", { class: "dot" }), "held-out evaluation", this.judged));
    if (this.curve.series.some((series) => series.low)) marks.push(h("span", { class: "muted" }, "band and whiskers: 95 % intervals"));
    return h("div", { class: "legend" }, marks);
  }

  key(event, open) {
    const moves = { ArrowLeft: -1, ArrowRight: 1 };
    if (event.key === "Enter" && pointed !== null) open(pointed);
    else if (event.key === "Escape") point(null);
    else if (event.key in moves) {
      const at = this.steps.indexOf(pointed);
      const next = at < 0 ? this.steps.length - 1 : at + moves[event.key];
      point(this.steps[Math.max(0, Math.min(this.steps.length - 1, next))]);
      event.preventDefault();
    }
  }

  nearest(offset) {
    const step = this.domain[0] + ((offset - EDGE.left) / this.inner) * (this.domain[1] - this.domain[0]);
    return this.steps.reduce((best, one) => (Math.abs(one - step) < Math.abs(best - step) ? one : best));
  }

  x(step) {
    const [first, last] = this.domain;
    return EDGE.left + ((step - first) / (last - first || 1)) * this.inner;
  }

  y(value) {
    const [low, high] = this.range;
    return this.height - EDGE.bottom - ((value - low) / (high - low)) * (this.height - EDGE.top - EDGE.bottom);
  }

  draw() {
    const { width, height } = this.plot.getBoundingClientRect();
    if (!width || (width === this.width && height === this.height)) return;
    [this.width, this.height, this.inner] = [width, height, width - EDGE.left - EDGE.right];
    const ticks = this.ticks();
    this.range = [ticks[0], ticks.at(-1)];
    this.cross = s("g", { class: "cross" });
    const drawn = this.curve.series.map((series, at) => this.line(series, at));
    this.plot.replaceChildren(s("svg", { width, height, "aria-hidden": true },
      this.grid(ticks), drawn, this.evaluated(), this.cross));
    this.point(pointed);
  }

  ticks() {
    const { series, evaluations = [], high, zero } = this.curve;
    const values = series.flatMap((one) => [...one.y, ...(one.low ?? []), ...(one.high ?? [])])
      .concat(evaluations.flatMap((one) => [one.low, one.high]));
    let [least, most] = [Math.min(...values, ...(zero ? [0] : [])), high ?? Math.max(...values)];
    if (least === most) [least, most] = zero || least === 0 ? [0, most || 1] : [least - Math.abs(least) / 2, most + Math.abs(most) / 2];
    const whole = ["turns", "versions"].includes(this.curve.unit);
    return niceTicks(least, most, this.curve.wide ? 5 : 4, whole ? 1 : 0);
  }

  grid(ticks) {
    const { left, top, bottom } = EDGE;
    const parts = [this.phase(), ...ticks.map((value) => s("g", {},
      s("line", { class: "grid", x1: EDGE.left, x2: this.width - EDGE.right, y1: this.y(value), y2: this.y(value) }),
      s("text", { class: "tick", x: EDGE.left - 8, y: this.y(value) + 4, "text-anchor": "end" }, tickText(value, this.curve.unit, ticks)))),
    s("text", { class: "axis", "text-anchor": "middle", transform: `translate(12 ${(top + this.height - bottom) / 2}) rotate(-90)` }, this.curve.axis),
    s("text", { class: "axis", "text-anchor": "middle", x: left + this.inner / 2, y: this.height - 4 }, "optimizer step")];
    const [first, last] = this.domain;
    for (const step of niceTicks(first, last, Math.max(3, Math.floor(this.inner / 60)), 1).filter((step) => step >= first && step <= last)) {
      parts.push(s("text", { class: "tick", x: this.x(step), y: this.height - 22, "text-anchor": "middle" }, String(step)));
    }
    for (const step of facts.resumes) if (step > first && step < last) parts.push(this.mark(step, "resumed"));
    return parts;
  }

  // The steps of imitation, shaded: the policy played none of their episodes.
  phase() {
    const [first, last] = this.domain;
    const end = Math.min(facts.imitation, last);
    if (end <= first) return null;
    return s("g", {}, s("rect", { class: "imitation", x: this.x(first), width: this.x(end) - this.x(first), y: EDGE.top, height: this.height - EDGE.top - EDGE.bottom }),
      this.curve.wide ? s("text", { class: "tick", x: this.x(first) + 6, y: EDGE.top + 14 }, "imitation") : null);
  }

  mark(step, text) {
    return s("g", {}, s("line", { class: "mark", x1: this.x(step), x2: this.x(step), y1: EDGE.top, y2: this.height - EDGE.bottom }),
      this.curve.wide ? s("text", { class: "tick", x: this.x(step) + 4, y: EDGE.top + 10 }, text) : null);
  }

  line({ x, y, low, high, colour }, place) {
    const at = colour ?? place;
    const points = x.map((step, place) => `${this.x(step).toFixed(1)},${this.y(y[place]).toFixed(1)}`);
    const path = this.curve.steps
      ? points.map((one, place) => (place ? `H${one.split(",")[0]}V${one.split(",")[1]}` : `M${one}`)).join("")
      : `M${points.join("L")}`;
    const parts = [s("path", { class: `series c${at}`, d: path })];
    if (low && (place === 0 || this.curve.bands)) {
      const above = x.map((step, place) => `${this.x(step)},${this.y(high[place])}`);
      const below = x.map((step, place) => `${this.x(step)},${this.y(low[place])}`).reverse();
      parts.unshift(s("path", { class: `band c${at}`, d: `M${[...above, ...below].join("L")}Z` }));
    }
    if (x.length === 1) parts.push(s("circle", { class: `spot c${at}`, cx: this.x(x[0]), cy: this.y(y[0]), r: 3 }));
    return parts;
  }

  evaluated() {
    return (this.curve.evaluations ?? []).filter((one) => one.value !== null).map(({ version, value, low, high, label }) => {
      const x = this.x(version);
      // Left of the dot in the right half, so that it stays within the plot.
      const left = x > this.width / 2;
      return s("g", { class: "evaluated" }, label ? s("text", { class: "tick", x: x + (left ? -8 : 8), y: this.y(value) + 4, "text-anchor": left ? "end" : "start" }, label) : null, s("line", { x1: x, x2: x, y1: this.y(low), y2: this.y(high) }),
        s("line", { x1: x - 4, x2: x + 4, y1: this.y(low), y2: this.y(low) }),
        s("line", { x1: x - 4, x2: x + 4, y1: this.y(high), y2: this.y(high) }),
        s("circle", { cx: x, cy: this.y(value), r: 4 }));
    });
  }

  // Show a step's values; of the last one when none is pointed at.
  point(step) {
    const { series, unit, evaluations = [] } = this.curve;
    const at = step ?? this.steps.at(-1);
    const texts = series.map(({ x, y, low, high }) => {
      // Runs end at different steps: each shows its own last value.
      const place = step === null && this.curve.bands ? x.length - 1 : x.indexOf(at);
      const interval = low && place >= 0 && series.length < 3 ? ` (${percents(low[place], high[place])})` : "";
      return withUnit(y[place], unit) + interval;
    });
    texts.forEach((text, place) => (this.values[place].textContent = text));
    const judged = evaluations.find((one) => one.version === at);
    this.judged.textContent = judged ? `${withUnit(judged.value, unit)} (${percents(judged.low, judged.high)})` : "";
    const when = step === null && this.curve.bands ? "last step" : `step ${at}`;
    this.readout.textContent = this.many ? when : `${when}: ${texts[0]}`;
    if (!this.cross) return;
    this.cross.replaceChildren();
    if (step === null) return;
    this.cross.append(s("line", { x1: this.x(step), x2: this.x(step), y1: EDGE.top, y2: this.height - EDGE.bottom }));
    series.forEach(({ x, y, colour }, number) => {
      const place = x.indexOf(step);
      if (place >= 0) this.cross.append(s("circle", { class: `spot c${colour ?? number}`, cx: this.x(step), cy: this.y(y[place]), r: 3.5 }));
    });
  }
}

function percents(low, high) {
  return `${(100 * low).toFixed(0)}–${(100 * high).toFixed(0)} %`;
}

function niceTicks(least, most, count, smallest = 0) {
  const rough = (most - least) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(smallest, power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough * 0.999));
  const whole = smallest ? Math.ceil(step) : step;
  const ticks = [];
  for (let at = Math.floor(least / whole + 1e-9); at * whole < most + whole * 0.999; at += 1) ticks.push(Number((at * whole).toPrecision(12)));
  return ticks;
}

function tickText(value, unit, ticks) {
  if (unit === "percent") return `${Number((100 * value).toFixed(1))} %`;
  if (unit === "bytes") return value === 0 ? "0" : withUnit(value, unit);
  if (unit === "seconds") return `${Math.abs(value) >= 10000 ? `${plain(value / 1000)}k` : plain(value)} s`;
  if (Math.abs(ticks.at(-1)) >= 10000) return value === 0 ? "0" : `${plain(value / 1000)}k`;
  return plain(value);
}

function drawCurves(place, open) {
  const steps = facts.curves.flatMap((curve) => [...curve.series.flatMap((series) => series.x), ...(curve.evaluations ?? []).map((one) => one.version)]);
  const domain = [steps.reduce((a, b) => Math.min(a, b), Infinity), steps.reduce((a, b) => Math.max(a, b), -Infinity)];
  if (charts.length === facts.curves.length && charts.every((chart, at) => chart.fits(facts.curves[at]))) {
    charts.forEach((chart, at) => chart.renew(facts.curves[at], domain));
    return;
  }
  charts.splice(0, charts.length, ...facts.curves.map((curve) => new Chart(curve, domain, open)));
  place.replaceChildren(...charts.map((chart) => chart.element));
}
