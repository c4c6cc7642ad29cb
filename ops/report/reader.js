// One episode to read turn by turn, or two of the same task side by side.

// Largest surprise (−100 ln p), class and text of each shade.
const SHADES = [[10.6, "p0", "≥ 0.9"], [69.4, "p1", "≥ 0.5"], [230.3, "p2", "≥ 0.1"], [460.6, "p3", "≥ 0.01"], [Infinity, "p4", "less"]];

class Reader {
  constructor(store, changed) {
    this.store = store;
    this.changed = changed;
    this.place = byId("reader");
    this.place.addEventListener("pointerover", (event) => this.tell(event.target.closest("[data-token]")));
    this.place.addEventListener("focusin", (event) => this.tell(event.target.closest("[data-token]")));
  }

  async show(id, other) {
    if (this.shown === `${id} ${other}`) return;
    this.shown = `${id} ${other}`;
    const [one, two] = [this.store.byId.get(id), this.store.byId.get(other)];
    if (!one) return this.empty(id);
    const asked = this.shown;
    const episodes = two ? [one, two] : [one];
    const bodies = await Promise.all(episodes.map((episode) => this.store.body(episode)));
    if (asked !== this.shown) return; // another episode was opened meanwhile
    this.one = one;
    this.two = two;
    const columns = episodes.map((episode, at) => h("section", { class: "column" }, two ? this.caption(episode, at) : null, turnsOf(episode, bodies[at], two ? parting(bodies) : null)));
    this.place.replaceChildren(this.head(one, two), this.tasks(one, two), legend(bodies), h("div", { class: two ? "columns two" : "columns" }, columns));
    this.place.scrollTop = 0;
  }

  empty(id) {
    this.one = this.two = null;
    const text = id ? `No episode ${id} in this page.` : this.store.episodes.length ? "Choose an episode to read it." : "This run has no episodes.";
    this.place.replaceChildren(h("p", { class: "empty" }, text));
  }

  head(one, two) {
    const { group } = one;
    return h("header", {},
      h("button", { type: "button", class: "back", onclick: () => this.changed({ open: "", with: "" }) }, "← List"),
      h("h2", {}, group.task, h("small", {}, group.env), " ", badge(one)),
      h("p", { class: "chips" },
        chip(glyph(one), one.outcome), chip("reward ", h("b", {}, reward(one.reward))), chip(`${one.turns} of ${group.horizon} turns`),
        one.low === null ? null : chip(one.low === one.high ? `version ${one.low}` : `versions ${one.low} to ${one.high}`),
        one.tokens ? chip(`${grouped(one.tokens)} tokens`) : null, chip(group.end)),
      two ? null : h("p", { class: "siblings" }, h("a", { href: address({ open: one.id, with: "" }) }, one.id), ", of a group of ", String(group.episodes.length), ": ",
        group.episodes.map((episode) => this.link(episode, one))));
  }

  link(episode, one) {
    return h("a", { class: "sibling", href: address({ open: episode.id, with: "" }), "aria-current": episode === one ? "true" : null,
      "aria-label": `episode ${episode.index}: ${episode.outcome}` }, glyph(episode));
  }

  caption(episode, at) {
    return h("h3", {}, glyph(episode), h("a", { href: address({ open: episode.id, with: "" }) }, episode.id),
      h("small", {}, `${player(episode)}, ${episode.outcome}, reward ${reward(episode.reward)}, ${episode.turns} turns`),
      at ? h("button", { type: "button", onclick: () => this.changed({ with: "" }) }, "Close") : null);
  }

  // Every episode of the task, by the version that played it. A click compares it with this one.
  tasks(one, two) {
    const all = this.store.ofTask(one);
    const shown = this.store.demonstrations(one);
    if (all.length + shown.length < 2) return h("p", { class: "hint" }, "The only episode of this task.");
    if (!all.length) return this.experts(one, two, shown);
    const [first, last] = [all[0].low, all.at(-1).low];
    const strip = h("div", { class: "strip" });
    const stacked = new Map(); // how many marks a version has so far
    all.forEach((episode, at) => {
      const height = first === last ? 0 : stacked.get(episode.low) ?? 0;
      stacked.set(episode.low, height + 1);
      const mark = this.mark(episode, one, two);
      mark.style.left = `${first === last ? (100 * (at + 0.5)) / all.length : (100 * (episode.low - first)) / (last - first)}%`;
      mark.style.top = `${14 * Math.min(height, 15)}px`;
      strip.append(mark);
    });
    strip.style.height = `${14 * Math.min(16, Math.max(...stacked.values())) + 4}px`;
    const versions = first === last ? `started by version ${first}` : `started by versions ${first} to ${last}`;
    return h("details", { class: "across", open: two || all.length <= 64 ? true : null },
      h("summary", {}, `This task: ${all.length} episodes, ${versions}`, h("span", { class: "hint" }, " Choose one to compare")),
      h("div", { class: "frame" }, strip), first === last ? null : h("div", { class: "ends" }, h("span", {}, `v${first}`), h("span", {}, `v${last}`)),
      shown.length ? this.experts(one, two, shown) : null);
  }

  experts(one, two, shown) {
    return h("p", { class: "siblings" }, "By an expert: ", shown.map((episode) => this.mark(episode, one, two)));
  }

  mark(episode, one, two) {
    const shown = episode === one ? "one" : episode === two ? "two" : "";
    return h("a", { class: `mark ${shown}`, href: address({ open: one.id, with: episode === one ? "" : episode.id }), tabindex: shown ? 0 : -1,
      title: `${episode.id}: ${player(episode)}, ${episode.outcome}, reward ${reward(episode.reward)}` }, glyph(episode));
  }

  // The episode of the task that is farthest from this one in versions.
  compare() {
    if (!this.one) return;
    if (this.two) return this.changed({ with: "" });
    const others = this.store.ofTask(this.one).filter((episode) => episode !== this.one);
    const far = others.sort((a, b) => Math.abs(b.low - this.one.low) - Math.abs(a.low - this.one.low))[0];
    if (far) this.changed({ with: far.id }, true);
  }

  // The next episode of the task, or the one before.
  along(by) {
    if (!this.one) return;
    const all = this.store.ofTask(this.one);
    const next = all[all.indexOf(this.one) + by];
    if (next) this.changed({ open: next.id, with: "" });
  }

  tell(token) {
    const place = byId("token");
    if (place && token) place.textContent = token.dataset.token;
  }
}

function chip(...content) {
  return h("span", { class: "chip" }, content);
}

function legend(bodies) {
  if (!bodies.some((body) => body.turns.some((turn) => turn.lengths))) return h("div", {});
  return h("div", { class: "shades" }, h("span", {}, "Probability of each token:"),
    SHADES.map(([, shade, text]) => h("span", { class: `shade ${shade}` }, text)), h("output", { id: "token" }, "Point at a token"));
}

// A turn's text without its special tokens, of which a demonstration shows none.
function spoken({ text, lengths, special = [] }) {
  let place = 0;
  const pieces = special.length ? lengths.map((length) => text.slice(place, (place += length))) : [text];
  return pieces.filter((_, at) => !special.includes(at)).join("");
}

// The first turn in which two episodes of a task differ.
function parting([one, two]) {
  const at = one.turns.findIndex((turn, place) => spoken(turn) !== (two.turns[place] && spoken(two.turns[place])));
  return at < 0 ? Math.min(one.turns.length, two.turns.length) : at;
}

// The branches of an episode one after the other; a turn keeps its number in time over all of them.
function turnsOf(episode, body, differs) {
  const parts = [block("Task", "prompt", [body.prompt])];
  const prompts = [null, ...(body.branches ?? [])];
  prompts.forEach((prompt, branch) => {
    const turns = body.turns.map((turn, at) => [turn, at]).filter(([turn]) => (turn.branch ?? 0) === branch);
    if (prompts.length > 1) parts.push(h("h3", { class: "branch" }, branch ? `Branch ${branch}` : "Main branch", h("small", {}, counted(turns.length, "turn"))));
    if (prompt !== null) parts.push(block("Context", "prompt", [prompt]));
    parts.push(...played(turns, differs));
  });
  parts.push(h("p", { class: "stop" }, body.error ? `Broken: ${body.error}` : `Ended: ${stopped(body.stop, episode)}`));
  if (body.refused) parts.push(h("p", { class: "stop" }, `${counted(body.refused, "request")} of the program refused, the last one: ${body.refusal}`));
  return parts;
}

function counted(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}

function played(turns, differs) {
  const parts = [];
  let version = null;
  turns.forEach(([turn, at]) => {
    const [generated, after] = generation(turn, version);
    version = after;
    const [thought, action] = generated;
    parts.push(h("div", { class: "turn" },
      h("h3", {}, `Turn ${at + 1}`, h("small", {}, `${turnNote(turn)}${turn.trained === false ? ", not trained" : ""}`), at === differs ? h("em", {}, "differs from here") : null, turn.reward ? h("b", { class: turn.reward > 0 ? "gain" : "loss" }, `reward ${turn.reward > 0 ? "+" : ""}${reward(turn.reward)}`) : null),
      thought.length ? block("Thought", "thought", thought) : null,
      block("Action", "action", action.length ? action : [h("i", {}, "empty")]),
      block("Observation", "observation", [turn.observation || h("i", {}, "none")])));
  });
  return parts;
}

function stopped(stop, episode) {
  return { terminated: "the environment ended the episode", horizon: `truncated by the horizon of ${episode.group.horizon} turns`,
    context: "the next turn would not fit into the context", env_truncated: "truncated by the environment's own limit" }[stop] ?? stop;
}

function turnNote({ versions, surprise }) {
  const [first, last] = [versions[0]?.[0], versions.at(-1)?.[0]];
  const by = first === undefined ? "" : first === last ? `version ${first}` : `versions ${first} → ${last}`;
  if (!surprise) return by;
  const mean = surprise.reduce((a, b) => a + b, 0) / surprise.length;
  return `${by}, ${surprise.length} tokens, mean logprob ${(-mean / 100).toFixed(2)}`;
}

function block(label, kind, content) {
  const long = kind === "observation" || kind === "prompt";
  return h("div", { class: `block ${kind}` }, h("span", { class: "label" }, label), h("div", { class: "text", tabindex: long ? 0 : null }, content));
}

// A turn's text as shaded tokens, parted into thought and action, with a mark wherever another version goes on.
function generation(turn, before) {
  const parts = [[], []];
  const { text, lengths, surprise, versions, special = [], action } = turn;
  if (!lengths) {
    if (action) parts[0].push(text.slice(0, action));
    parts[1].push(text.slice(action));
    return [parts, versions.at(-1)?.[0] ?? before];
  }
  const unprinted = new Set(special);
  let [place, within, left, version] = [0, 0, versions[0]?.[1] ?? 0, before];
  lengths.forEach((length, at) => {
    while (left === 0 && within + 1 < versions.length) left = versions[++within][1];
    const now = versions[within]?.[0] ?? null;
    const side = place < action ? 0 : 1;
    if (now !== version && version !== null) parts[side].push(h("span", { class: "boundary", title: `sampled by version ${now} from here on`, "data-version": `v${now}` }));
    version = now;
    left -= 1;
    const piece = text.slice(place, place + length);
    const split = side === 0 ? Math.max(0, Math.min(length, action - place)) : length;
    if (split) parts[side].push(token(piece.slice(0, split), surprise[at], now, unprinted.has(at)));
    if (split < length) parts[1].push(token(piece.slice(split), surprise[at], now, unprinted.has(at)));
    place += length;
  });
  return [parts, version];
}

function token(text, surprise, version, special) {
  const shade = SHADES.find(([most]) => surprise <= most)[1];
  const details = `“${text.replaceAll("\n", "⏎")}”  p ${probability(surprise)}, logprob ${(-surprise / 100).toFixed(2)}, version ${version}`;
  return h("span", { class: `token ${shade}${special ? " special" : ""}`, "data-token": details }, text);
}

function probability(surprise) {
  const p = Math.exp(-surprise / 100);
  return p >= 0.001 ? p.toFixed(p > 0.9995 ? 0 : 3) : p.toExponential(1);
}
