// The run's data. Facts are read at once, the index of episodes when the page opens, a chunk of bodies when one of its episodes is.

let facts = JSON.parse(byId("facts").textContent);
const KEPT_CHUNKS = 12;

// Data that the page holds, or that the server of a live page has.
async function packed(id) {
  const held = byId(id);
  if (held) return held.textContent;
  const answer = await fetch(id, { cache: "no-store" });
  if (!answer.ok) throw new Error(`${id}: ${answer.status}`);
  return answer.text();
}

async function unpacked(id) {
  const bytes = Uint8Array.from(atob(await packed(id)), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

class Store {
  constructor({ groups, rows, starts }, edition = "") {
    this.starts = starts;
    this.edition = edition;
    this.groups = groups.map(([ticket, env, task, horizon, step, end]) =>
      ({ ticket, kind: ticket.split("-")[0], env, task, horizon, step, end, key: `${env}/${task}`, search: `${env} ${task} ${ticket}`.toLowerCase(), episodes: [] }));
    this.episodes = rows.map(([group, index, outcome, earned, turns, tokens, low, high], row) => {
      const owner = this.groups[group];
      const episode = { row, id: `${owner.ticket}.${index}`, group: owner, index, outcome, reward: earned, turns, tokens, low, high };
      owner.episodes.push(episode);
      return episode;
    });
    this.byId = new Map(this.episodes.map((episode) => [episode.id, episode]));
    this.byTask = new Map();
    for (const episode of this.episodes) {
      const task = this.byTask.get(episode.group.key) ?? [];
      this.byTask.set(episode.group.key, task);
      task.push(episode);
    }
    this.chunks = new Map();
  }

  // The policy's episodes of one task, the oldest version first.
  ofTask(episode) {
    return this.byTask.get(episode.group.key).filter((one) => one.low !== null).sort((a, b) => a.low - b.low || a.row - b.row);
  }

  demonstrations(episode) {
    return this.byTask.get(episode.group.key).filter((one) => one.group.kind === "demo");
  }

  async body(episode) {
    let chunk = this.starts.length - 1;
    while (this.starts[chunk] > episode.row) chunk -= 1;
    if (!this.chunks.has(chunk)) {
      this.chunks.set(chunk, unpacked(`chunk-${chunk}${this.edition}`));
      if (this.chunks.size > KEPT_CHUNKS) this.chunks.delete(this.chunks.keys().next().value);
    }
    return (await this.chunks.get(chunk))[episode.row - this.starts[chunk]];
  }
}

// The kind of an outcome, which decides its colour and glyph: success, failure, truncated or broken.
function kindOf(outcome) {
  return outcome.split(":")[0];
}

const GLYPHS = { success: "●", failure: "○", truncated: "◐", broken: "✕", demo: "◆" };
const KINDS = { train: "the policy, in training", eval: "the policy, held-out", demo: "an expert" };
const BADGES = { eval: "held-out", demo: "demonstration" };

function glyph({ outcome, group }) {
  const kind = group.kind === "demo" && outcome === "success" ? "demo" : kindOf(outcome);
  return h("span", { class: `glyph ${kind}`, title: outcome, role: "img", "aria-label": outcome }, GLYPHS[kind]);
}

// Marks an episode that the policy in training did not play.
function badge({ group: { kind } }) {
  return BADGES[kind] ? h("span", { class: `badge ${kind}` }, BADGES[kind]) : null;
}

function player({ group, low, high }) {
  if (group.kind === "demo") return "an expert";
  return low === null ? "–" : low === high ? `v${low}` : `v${low}–${high}`;
}
