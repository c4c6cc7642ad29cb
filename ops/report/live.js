// A live page asks the server that it came from for what is new, and draws only what has changed.

const LOOK_MS = 2000;
const MISSES = 5;  // in a row: a machine that slept, or a busy one, answers again

async function follow() {
  let { edition } = facts;
  let missed = 0;
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
    if (document.hidden) continue;
    let answer;
    try {
      answer = await (await fetch(`facts?edition=${edition}`, { cache: "no-store" })).json();
      missed = 0;
    } catch {
      if (++missed < MISSES) continue;
      return told("The server of this page has ended: what is shown is the last that it said.");
    }
    facts = { ...answer.facts, live: true };
    drawOverview();
    drawCurves(byId("curves"), openStep);
    if (answer.edition !== edition) {
      try {
        const newer = new Store(await unpacked(`index?edition=${answer.edition}`), `?edition=${answer.edition}`);
        edition = answer.edition;
        [store, reader.store] = [newer, newer];
        byId("total").textContent = grouped(store.episodes.length);
        list.renew(store, asked().parameters);
      } catch {
        // Newer episodes took the place of these while they were asked for: the next look has them.
      }
    }
    if (answer.ended && answer.edition === edition) return told("The run has ended. `horizonrl report` writes its page.");
  }
}

function told(text) {
  byId("live").textContent = text;
  byId("live").classList.remove("on");
}

if (facts.live) {
  byId("live").hidden = false;
  follow();
}
