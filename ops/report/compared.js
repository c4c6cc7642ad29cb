// Several runs and evaluations beside each other, and the table of one evaluation.

// A subject's name in the colour of its curves.
function subject(at) {
  return h("span", { class: "subject" }, h("i", { class: `swatch c${at}` }), h("b", {}, facts.subjects[at].name));
}

function drawCompared(place) {
  const [whole] = facts.rows;
  place.append(h("h2", {}, "Held-out success"), h("p", { class: "hint" },
    "Of the last evaluation, on tasks that are never trained on; ranges are 95 % Wilson intervals. The difference is from the first one. "
    + "A star marks a 95 % interval without zero, not corrected for the number of comparisons. It is about these episodes: another training seed may differ by more."));
  const rows = facts.subjects.map(({ badges }, at) => {
    const cell = whole?.cells[at];
    return [h("span", { class: "who" }, subject(at), h("span", { class: "badges" }, badges.map((text) => h("span", { class: `badge life ${text.split(" ")[0]}` }, text)))),
      cell ? interval(cell.value, cell.low, cell.high) : "–", cell ? cell.episodes : "–", at ? difference(cell?.difference) : "the first"];
  });
  place.append(table(["", whole ? whole.task : "success", "Episodes", "Difference"], rows, "compared"));
}

function drawParts(place) {
  if (facts.rows.length < 2) return;
  place.append(h("h2", {}, "By environment and category"), table(["", ...facts.subjects.map((_, at) => subject(at))],
    facts.rows.slice(1).map(({ task, cells }) => [task, ...cells.map((cell, at) =>
      (cell ? h("span", { class: "cell" }, interval(cell.value, cell.low, cell.high), at ? difference(cell.difference) : null) : "–"))]), "parts"));
}

function difference(found) {
  if (!found) return h("span", { class: "note" }, "did not play the same");
  const { value, low, high, how, differs } = found;
  const points = (share) => `${share > 0 ? "+" : share < 0 ? "−" : ""}${Math.abs(100 * share).toFixed(1)}`;
  const [text, range] = [`${points(value)} points${differs ? " *" : ""}`, `${points(low)} to ${points(high)}`];
  return h("span", { class: "difference", title: how }, h(differs ? "b" : "span", { class: differs ? (value > 0 ? "gain" : "loss") : null }, text), h("small", {}, range));
}

function drawDifferences(place) {
  if (!facts.settings) return null;
  if (!facts.settings.length) return place.append(h("h2", {}, "Settings"), h("p", { class: "hint" }, "They do not differ in any setting."));
  return place.append(h("h2", {}, "Settings that differ"),
    table(["", ...facts.subjects.map((_, at) => subject(at))], facts.settings.map(([key, ...values]) => [h("code", {}, key), ...values]), "facts"));
}

function drawResults(place) {
  const most = facts.samples.at(-1);
  const shown = most > 1 ? facts.samples : [];
  const heads = ["Scenario", "Task", "Success", "Episodes", ...shown.map((k) => `pass@${k}`), "Return", "Turns", "Tokens", "Broken"];
  for (const { title, rows } of facts.blocks) {
    place.append(h("h2", {}, title), table(heads, rows.map((row) => [row.scenario, row.task === "all" ? h("b", {}, row.task) : row.task,
      row.episodes ? interval(row.success_rate, row.low, row.high) : "–", row.episodes, ...shown.map((k) => withUnit(row.pass_at[k], "percent")),
      ...[row.return_mean, row.turns_mean].map((mean) => withUnit(mean, "number")), row.tokens_mean === null ? "–" : grouped(row.tokens_mean), row.broken])));
  }
  if (facts.blocks.length) place.append(h("p", { class: "hint" }, "Ranges are 95 % Wilson intervals over the episodes that did not break; return, turns and tokens are means of an episode."));
}

function drawSettings(place) {
  place.append(h("h2", {}, "Settings"), h("details", {}, h("summary", {}, "What the episodes depend on"), h("pre", { tabindex: 0 }, facts.settings)));
}
