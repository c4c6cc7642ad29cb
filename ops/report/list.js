// The list of episodes: filters and order. Only the rows in view are in the document.

const ROW = 46;
const BEYOND = 8;
const FILTERS = ["text", "kind", "env", "outcome", "horizon", "v0", "v1", "r0", "r1", "order"];
const ORDERS = {
  newest: ["newest first", (a, b) => b.row - a.row],
  oldest: ["oldest first", (a, b) => a.row - b.row],
  best: ["highest reward", (a, b) => b.reward - a.reward || b.row - a.row],
  worst: ["lowest reward", (a, b) => a.reward - b.reward || b.row - a.row],
  longest: ["most turns", (a, b) => b.turns - a.turns || b.row - a.row],
  shortest: ["fewest turns", (a, b) => a.turns - b.turns || b.row - a.row],
};

class List {
  constructor(store, changed) {
    this.store = store;
    this.changed = changed;
    this.form = byId("filters");
    this.place = byId("list");
    this.rows = byId("rows");
    this.found = [];
    this.fill();
    this.form.elements.order.append(...Object.entries(ORDERS).map(([value, [text]]) => h("option", { value: value === "newest" ? "" : value }, text)));
    this.form.addEventListener("input", () => changed(this.given()));
    this.form.addEventListener("submit", (event) => event.preventDefault());
    byId("clear").addEventListener("click", () => changed({ ...Object.fromEntries(FILTERS.map((name) => [name, ""])), step: "" }));
    this.place.addEventListener("scroll", () => this.draw(), { passive: true });
    this.rows.addEventListener("click", (event) => {
      const row = event.target.closest("[data-id]");
      if (row) changed({ open: row.dataset.id, with: "" }, true);
    });
    new ResizeObserver(() => this.draw()).observe(this.place);
    byId("more").open = matchMedia("(min-width: 48rem) and (min-height: 40rem)").matches;
  }

  fill() {
    const { groups, episodes } = this.store;
    const options = (name, values, any) => {
      const field = this.form.elements[name];
      const chosen = field.value;
      field.replaceChildren(h("option", { value: "" }, any), ...values.map(([value, text]) => h("option", { value }, text)));
      field.value = chosen;
    };
    const counted = (value) => {
      const counts = new Map();
      for (const episode of episodes) counts.set(value(episode), (counts.get(value(episode)) ?? 0) + 1);
      return counts;
    };
    const listed = (counts, order) => [...counts].sort(order).map(([value, count]) => [value, `${value} (${grouped(count)})`]);
    const kinds = counted((one) => one.group.kind);
    options("kind", Object.entries(KINDS).filter(([kind]) => kinds.has(kind)).map(([kind, text]) => [kind, `${text} (${grouped(kinds.get(kind))})`]), "all");
    options("env", listed(counted((one) => one.group.env)), "all");
    options("outcome", listed(counted((one) => one.outcome), (a, b) => b[1] - a[1]), "all");
    options("horizon", [...new Set(groups.map((group) => group.horizon))].sort((a, b) => a - b).map((turns) => [turns, `${turns} turns`]), "all");
  }

  // Take the episodes that have come since, and stay where the reader is.
  renew(store, asked) {
    this.store = store;
    this.fill();
    this.key = null;
    const { scrollTop } = this.place;
    this.apply(asked);
    this.place.scrollTop = scrollTop;
    this.draw(true);
  }

  given() {
    return Object.fromEntries(FILTERS.map((name) => [name, this.form.elements[name].value.trim()]));
  }

  // Show what the parameters of the address ask for.
  apply(asked) {
    for (const name of FILTERS) {
      const field = this.form.elements[name];
      if (field !== document.activeElement) field.value = asked.get(name) ?? "";
    }
    const key = JSON.stringify([...FILTERS, "step"].map((name) => asked.get(name)));
    if (key !== this.key) {
      this.key = key;
      this.found = this.store.episodes.filter(wanted(asked)).sort((ORDERS[asked.get("order")] ?? ORDERS.newest)[1]);
      this.rows.style.height = `${this.found.length * ROW}px`;
      this.place.scrollTop = 0;
      this.drawn = null;
      this.say(asked);
    }
    this.open = asked.get("open");
    this.reveal();
    this.draw(true);
  }

  say(asked) {
    const all = this.store.episodes.length;
    const judged = this.found.filter((one) => one.group.kind !== "demo" && kindOf(one.outcome) !== "broken");
    const solved = judged.filter((one) => one.outcome === "success").length;
    const success = judged.length ? `, ${withUnit(solved / judged.length, "percent")} success` : "";
    const step = asked.get("step") ? ` of step ${asked.get("step")}` : "";
    byId("found").textContent = this.found.length
      ? `${grouped(this.found.length)} of ${grouped(all)} episodes${step}${success}`
      : all ? "No episode matches" : "This run has no episodes";
    byId("found").title = "The policy's success. Demonstrations and broken episodes do not count.";
    byId("clear").hidden = ![...FILTERS, "step"].some((name) => asked.get(name));
  }

  at() {
    return this.found.findIndex((one) => one.id === this.open);
  }

  move(by) {
    if (!this.found.length) return;
    const at = this.at();
    const next = at < 0 ? 0 : Math.max(0, Math.min(this.found.length - 1, at + by));
    this.changed({ open: this.found[next].id, with: "" });
  }

  reveal() {
    const at = this.at();
    const { scrollTop, clientHeight } = this.place;
    if (at < 0 || !clientHeight) return;
    if (at * ROW < scrollTop) this.place.scrollTop = at * ROW;
    else if ((at + 1) * ROW > scrollTop + clientHeight) this.place.scrollTop = (at + 1) * ROW - clientHeight;
  }

  draw(anew = false) {
    const first = Math.max(0, Math.floor(this.place.scrollTop / ROW) - BEYOND);
    const last = Math.min(this.found.length, Math.ceil((this.place.scrollTop + this.place.clientHeight) / ROW) + BEYOND);
    const drawn = `${first}-${last}`;
    if (!anew && drawn === this.drawn) return;
    this.drawn = drawn;
    this.rows.replaceChildren(...this.found.slice(first, last).map((episode, place) => this.row(episode, first + place)));
    this.place.setAttribute("aria-activedescendant", this.at() >= 0 ? `row-${this.open}` : "");
  }

  row(episode, place) {
    const { group } = episode;
    const row = h("div", { class: "row", role: "option", id: `row-${episode.id}`, "data-id": episode.id, "aria-selected": String(episode.id === this.open),
      "aria-setsize": this.found.length, "aria-posinset": place + 1 },
      glyph(episode),
      h("span", { class: "task" }, badge(episode), group.task),
      h("span", { class: "reward" }, reward(episode.reward)),
      h("span", { class: "note" }, `${group.env} · ${episode.id}`),
      h("span", { class: "note end" }, `${group.kind === "demo" || episode.low === null ? "" : `${player(episode)} · `}${episode.turns}/${group.horizon} turns`));
    row.style.top = `${place * ROW}px`;
    return row;
  }
}

function wanted(asked) {
  const words = (asked.get("text") ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  const number = (name, otherwise) => (asked.get(name) ? Number(asked.get(name)) : otherwise);
  const [v0, v1, r0, r1] = [number("v0", -Infinity), number("v1", Infinity), number("r0", -Infinity), number("r1", Infinity)];
  const versions = asked.get("v0") || asked.get("v1");
  const same = (name, value) => !asked.get(name) || asked.get(name) === String(value);
  return ({ group, outcome, reward, low, high, id }) => same("kind", group.kind) && same("env", group.env) && same("outcome", outcome) && same("horizon", group.horizon)
    && same("step", group.step) && reward >= r0 && reward <= r1 && (!versions || (low !== null && high >= v0 && low <= v1))
    && words.every((word) => group.search.includes(word) || id.includes(word));
}
