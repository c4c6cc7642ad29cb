// The address says what is shown: `#/overview`, or `#/episodes?` with filters, `open`, and `with` for a comparison.

let store = null;
let list = null;
let reader = null;

function asked() {
  const [view, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { view: view === "episodes" && facts.kind !== "comparison" ? view : "overview", parameters: new URLSearchParams(query) };
}

function address(patch, view = "episodes") {
  const parameters = view === asked().view ? asked().parameters : new URLSearchParams();
  for (const [name, value] of Object.entries(patch)) value === "" ? parameters.delete(name) : parameters.set(name, value);
  const query = parameters.toString();
  return `#/${view}${query ? `?${query}` : ""}`;
}

// Change what is shown. What a person may want to come back to gets a place in the browser's history.
function change(patch, remembered = false) {
  const target = address(patch);
  if (target === location.hash) return;
  if (remembered) location.hash = target;
  else {
    history.replaceState(null, "", target);
    show();
  }
}

function show() {
  const { view, parameters } = asked();
  byId("overview").hidden = view !== "overview";
  byId("episodes").hidden = view !== "episodes";
  document.body.classList.toggle("browsing", view === "episodes");
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (view !== "episodes" || !store) return;
  document.body.classList.toggle("reading", parameters.has("open"));
  list.apply(parameters);
  reader.show(parameters.get("open"), parameters.get("with"));
}

function key(event) {
  const typing = event.target.matches("input, select, textarea");
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") return escape(event.target, typing);
  if (typing) return;
  if (event.key === "/" && facts.kind !== "comparison") {
    if (asked().view !== "episodes") location.hash = "#/episodes";
    show();
    byId("text").focus();
    event.preventDefault();
  }
  if (asked().view !== "episodes" || !store) return;
  const scrolls = event.target.matches(".text");
  const moves = { j: 1, k: -1, ...(scrolls ? {} : { ArrowDown: 1, ArrowUp: -1 }) };
  if (event.key in moves) list.move(moves[event.key]);
  else if (event.key === "c") reader.compare();
  else if (event.key === "]") reader.along(1);
  else if (event.key === "[") reader.along(-1);
  else if (event.key === "Enter" && event.target === byId("list")) byId("reader").focus();
  else return;
  event.preventDefault();
}

function escape(target, typing) {
  const { view, parameters } = asked();
  if (typing) {
    target.blur();
    byId("list").focus();
  } else if (view === "episodes" && parameters.has("with")) change({ with: "" });
  else if (view === "episodes" && parameters.has("open")) {
    change({ open: "" });
    byId("list").focus();
  }
}

function openStep(step) {
  if (facts.kind !== "comparison") location.hash = `#/episodes?step=${step}`;
}

drawOverview();
drawCurves(byId("curves"), openStep);
addEventListener("hashchange", show);
document.addEventListener("keydown", key);
show();
store = new Store(await unpacked("index"), facts.live ? `?edition=${facts.edition}` : "");
byId("total").textContent = grouped(store.episodes.length);
list = new List(store, change);
reader = new Reader(store, change);
show();
document.documentElement.dataset.ready = "true";
