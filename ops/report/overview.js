// What the run came to, in tables: evaluations, tickets, decisions, lineages, config.

// The sections of each kind of page, by the id of their place.
const SECTIONS = {
  run: { headline: drawHeadline, evaluations: drawEvaluations, accounts: drawAccounts, decisions: drawDecisions, draws: drawDraws, selection: drawSelection, lineages: drawLineages, config: drawConfig },
  evaluation: { headline: drawHeadline, results: drawResults, config: drawSettings },
  comparison: { compared: drawCompared, parts: drawParts, config: drawDifferences },
};

function drawOverview() {
  byId("name").textContent = facts.name;
  drawState();
  fill("notices", (place) => place.append(...facts.notices.map((text) => h("li", {}, text))));
  for (const [id, draw] of Object.entries(SECTIONS[facts.kind])) fill(id, draw);
  byId("drawn").hidden = !facts.curves.length && facts.kind !== "run";
  byId("opens").hidden = byId("views").hidden = facts.kind === "comparison";
}

// Draw a place anew, if that changes anything: what is read, selected or unfolded there stays as it is.
function fill(id, draw) {
  const place = byId(id);
  const made = place.cloneNode(false);
  draw(made);
  const unfolded = [...place.querySelectorAll("details")].map((one) => one.open);
  made.querySelectorAll("details").forEach((one, at) => (one.open = unfolded[at] ?? one.open));
  if (made.innerHTML !== place.innerHTML) place.replaceChildren(...made.childNodes);
}

function drawHeadline(place) {
  place.append(...facts.headline.map(({ label, value, unit, note }) =>
    h("div", {}, h("dt", {}, label), h("dd", {}, withUnit(value, unit)), h("dd", { class: "note" }, note))));
}

function drawConfig(place) {
  place.append(h("h2", {}, "Config"),
    table([], facts.summary.map(([what, how]) => [h("b", {}, what), how]), "facts"),
    h("details", {}, h("summary", {}, "The whole config, as a recipe for this run"), h("pre", { tabindex: 0 }, facts.config)));
}

function drawState() {
  if (facts.kind !== "run") return (byId("state").textContent = facts.kind);
  const { finished, step, steps, started, last } = facts.state;
  const took = started && last ? `, ${ago(last - started)}` : "";
  const since = last ? `; the last step was ${ago(facts.written - last)} before this page was written` : "";
  const state = byId("state");
  state.textContent = finished ? `finished: ${grouped(steps)} steps${took}` : `unfinished: step ${grouped(step)} of ${grouped(steps)}${took}${since}`;
  state.classList.toggle("open", !finished);
  return null;
}

function table(heads, rows, kind = "") {
  const top = heads.length ? h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))) : null;
  const body = h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell) => h("td", { class: typeof cell === "number" ? "number" : null },
    typeof cell === "number" ? grouped(cell) : cell)))));
  return h("div", { class: "scroll" }, h("table", { class: kind }, top, body));
}

function drawEvaluations(place) {
  place.append(h("h2", {}, "Evaluations"));
  if (!facts.evaluations.length) return place.append(h("p", { class: "hint" }, "This run has no evaluations yet."));
  const parts = [...new Set(facts.evaluations.flatMap((one) => one.parts.map((part) => part.name)))];
  const most = Object.keys(facts.evaluations[0].pass).at(-1);
  const best = Math.max(...facts.evaluations.map((one) => one.value ?? -1));
  const rows = facts.evaluations.map((one) => [
    h("a", { href: `#/episodes?kind=eval&step=${one.version}` }, `v${one.version}`),
    interval(one.value, one.low, one.high, one.value === best),
    one.episodes,
    ...(most === "1" ? [] : [withUnit(one.pass[most], "percent")]),
    withUnit(one.truncated, "percent"),
    ...[one.return, one.turns].map((mean) => withUnit(mean, "number")),
    one.broken + one.dropped,
    ...parts.map((name) => one.parts.find((part) => part.name === name)).map((part) => (part ? interval(part.success_rate, part.low, part.high) : "–")),
  ]);
  const heads = ["Version", "Success", "Episodes", ...(most === "1" ? [] : [`pass@${most}`]), "Truncated", "Return", "Turns", "Broken", ...parts];
  place.append(h("p", { class: "hint" }, "Held-out tasks, which are never trained on. A version links to its episodes. Bars and ranges are 95 % Wilson intervals."), table(heads, rows));
}

function interval(value, low, high, best = false) {
  if (value === null) return "–";
  const bar = s("svg", { class: "interval", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": true },
    s("line", { class: "whole", x1: 0, x2: 100, y1: 5, y2: 5 }), s("line", { class: "range", x1: 100 * low, x2: 100 * high, y1: 5, y2: 5 }),
    s("line", { class: "at", x1: 100 * value, x2: 100 * value, y1: 1, y2: 9 }));
  return h("span", { class: "measured" }, h(best ? "b" : "span", {}, withUnit(value, "percent")), bar,
    h("small", {}, percents(low, high)));
}

function drawAccounts(place) {
  const { kinds, reasons, repeats, settled, step, issued, outstanding, later, open } = facts.accounts;
  place.append(h("h2", {}, "Conservation"));
  if (!settled) return place.append(h("p", { class: "hint" }, "No ticket has ended yet."));
  const ends = ["trained", "evaluated", ...reasons, "void"];
  const rows = Object.entries(kinds).filter(([, ended]) => Object.keys(ended).length).map(([kind, ended]) =>
    [h("b", {}, kind), ...ends.map((end) => ended[end] ?? 0), Object.values(ended).reduce((a, b) => a + b, 0)]);
  const heads = ["Tickets", "trained", "evaluated", ...reasons.map((reason) => `dropped: ${reason.replaceAll("_", " ")}`), "void", "ended"];
  place.append(h("p", { class: "hint" }, "Every ticket ends exactly once. Counted from the ledger and the evaluations."), table(heads, rows));
  if (issued === undefined) return;
  const awaited = open > 0 ? ` + ${grouped(open)} in unfinished evaluations` : "";
  const known = settled - later;
  place.append(h("p", { class: open < 0 ? "balance off" : "balance" }, `At step ${grouped(step)}: ${grouped(issued)} issued = ${grouped(known)} ended${awaited}`
    + ` + ${grouped(outstanding)} outstanding. ${open < 0 ? `The accounts are off by ${grouped(-open)} tickets.` : "The accounts balance."}`
    + (later > 0 ? ` Since then ${grouped(later)} more have ended.` : "") + (repeats ? ` ${grouped(repeats)} repeated messages were refused.` : "")));
}

function drawDecisions(place) {
  place.append(h("h2", {}, "Horizon schedule"));
  if (!facts.decisions.length) return place.append(h("p", { class: "hint" }, "The horizon has not changed in this run."));
  place.append(table(["After step", "Environment", "Horizon", "Why", "First in step"], facts.decisions.map((one) =>
    [one.step, one.env_id, `${one.from_turns} → ${one.to_turns} turns`, one.reason, one.first_step ?? "not yet"])));
}

// What an adaptive curriculum drew, and why; nothing for a uniform one.
function drawDraws(place) {
  if (!facts.draws.length) return;
  place.append(h("h2", {}, "Curriculum"),
    h("p", { class: "hint" }, "Where the train tickets of an environment come from: tasks whose last group differed in return, and categories by how often their groups do."),
    table(["Environment", "Drawn from", "Tasks", "Groups that differed", "Share at first", "Share now"], facts.draws.map((one) => [
      one.env_id, one.category === "(repeated)" ? "tasks that differed last time" : one.category, one.tasks,
      one.differed === null ? "none yet" : withUnit(one.differed, "percent"), one.first === null ? "" : withUnit(one.first, "percent"), withUnit(one.share, "percent")])));
}

// Whether what takes long is trained as often as what is quick; nothing before there are groups enough.
function drawSelection(place) {
  if (!facts.selection.length) return;
  place.append(h("h2", {}, "Trained by duration"),
    h("p", { class: "hint" }, "Tenths of the train groups, by the time that they took their actor. Trained: the share of those whose episodes did not all earn the same. Void tickets have no duration."),
    table(["Seconds", "Trained", "", "Earned the same", "Refused"], facts.selection.map((one) => [
      `${one.low_s.toFixed(1)} to ${one.high_s.toFixed(1)}`, one.share === null ? "–" : withUnit(one.share, "percent"), one.trained, one.alike, one.refused])));
}

function drawLineages(place) {
  place.append(h("h2", {}, "Lineage"));
  if (!facts.lineages.length) return place.append(h("p", { class: "hint" }, "No learner has started yet."));
  place.append(h("p", { class: "hint" }, "One line per start of the learner. Steps that a crash rolled back belong to no line."),
    table(["Lineage", "Started", "From step", "Its steps", "Changed in the config"], facts.lineages.map((one) => [
      h("b", {}, String(one.lineage)), new Date(1000 * one.time).toISOString().replace("T", " ").slice(0, 16) + " UTC", one.from_step,
      one.first === null ? "none" : `${one.first} to ${one.last}`,
      Object.entries(one.changed).map(([key, [before, now]]) => `${key}: ${JSON.stringify(before)} → ${JSON.stringify(now)}`).join(", ") || "nothing"])));
}
