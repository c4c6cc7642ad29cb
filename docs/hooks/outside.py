"""A hook of mkdocs: pages that stand outside `docs/`, links that lead out of it, and the list of decisions.

The protocol is package data and the contributing guide belongs at the root: they become pages where they are. A link to
a file of the source keeps its text and tells the place, since the site does not hold the source.
"""

import json
import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
OUTSIDE = {
    "broker/PROTOCOL.md": "protocol.md",
    "examples/README.md": "examples.md",
    "examples/local-run/README.md": "local-run.md",
    "examples/external-broker/README.md": "external-broker.md",
    "examples/own-environment/README.md": "own-environment.md",
    "examples/smolagents/README.md": "smolagents.md",
    "examples/own-loss/README.md": "own-loss-example.md",
    "examples/evaluate-endpoint/README.md": "evaluate-endpoint.md",
    "examples/resume-elsewhere/README.md": "resume-elsewhere.md",
    "examples/actor-js/README.md": "actor-js.md",
    "examples/notebook/README.md": "notebook.md",
    "examples/hubs/README.md": "other-hubs.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Files of the repository that are pages too, and their names on the site."""
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)")

SEARCH_SCRIPT = "search/iframe-worker.js"
"""Of `extra.polyfills`; the plugin `offline` knows a script of this kind by its name."""
WORKER = """\
if (location.protocol === "file:") {
  const source = URL.createObjectURL(new Blob([SOURCE], { type: "text/javascript" }));
  const FromServer = Worker;
  window.Worker = class extends FromServer {
    constructor() { super(source); }
  };
}
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that stand outside."""
    for source, name in OUTSIDE.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    return files


def on_post_build(config: MkDocsConfig) -> None:
    """Write the script with which search works from the disk, where a browser lets a page start no worker of a file.

    It holds the worker's own source, and starts that.
    """
    # Unpacked, so that a theme that renames its worker ends the build.
    (worker,) = Path(config.site_dir).glob("assets/javascripts/workers/search.*.min.js")
    source = json.dumps(worker.read_text(encoding="utf-8")).replace("<", "\\u003c")
    (Path(config.site_dir) / SEARCH_SCRIPT).write_text(
        WORKER.replace("SOURCE", source), encoding="utf-8"
    )


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let each link lead to where its file is on the site; list the decisions on their page."""
    source = Path(str(page.file.abs_src_path))
    here = Path(page.file.src_uri).parent

    def place_link(link: re.Match[str]) -> str:
        text, target, anchor = link[1], (source.parent / link[2]).resolve(), link[3] or ""
        if not target.exists():
            return link[0]  # mkdocs says so
        uri = _uri(target)
        if uri is None:
            return f'<span class="source" title="{_tell_place(target, anchor)}">{text}</span>'
        return f"[{text}]({os.path.relpath(uri, here)}{anchor})"

    return LINK.sub(place_link, markdown) + (
        _decisions() if page.file.src_uri == "adr/index.md" else ""
    )


def _decisions() -> str:
    records = sorted((DOCS / "adr").glob("[0-9]*.md"))
    titles = {
        record.name: record.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        for record in records
    }
    return "\n" + "\n".join(f"- [{title}]({name})" for name, title in titles.items()) + "\n"


def _uri(target: Path) -> str | None:
    """Return a file's name on the site, None where it is not part of it. A folder of pages stands for its index."""
    outside = {ROOT / source: name for source, name in OUTSIDE.items()}
    if target in outside:
        return outside[target]
    if target.is_relative_to(DOCS):
        page = target / "index.md" if target.is_dir() else target
        return page.relative_to(DOCS).as_posix()
    return None


def _tell_place(target: Path, anchor: str) -> str:
    line = anchor.removeprefix("#L")
    return target.relative_to(ROOT).as_posix() + (f", line {line}" if line.isdecimal() else "")
