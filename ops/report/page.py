"""`horizonrl report`: a run, an evaluation, or several of them, as one HTML page that needs no network and no server.

Flow: directories → **page**. Whatever a run has written reaches the page as data, never as markup: as JSON without
`<`, or as base64. The page's content security policy allows one script and one style, by digest, and nothing else.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError
from horizonrl.common.files import atomic_write_text
from horizonrl.common.run_dir import REPORT
from horizonrl.ops.models.models import known_model
from horizonrl.ops.report.compare import NEITHER, comparison, is_evaluation, read_compared
from horizonrl.ops.report.episodes import Episodes, collect, compress
from horizonrl.ops.report.facts import facts
from horizonrl.ops.report.judged import read_judged
from horizonrl.ops.report.tokens import TokenTexts
from horizonrl.ops.rundir.directory import read_config
from horizonrl.ops.rundir.files import Files
from horizonrl.ops.rundir.view import RunView

SCRIPTS = (
    "elements.js", "store.js", "charts.js", "overview.js", "compared.js", "list.js", "reader.js", "app.js", "live.js",
)  # fmt: skip
"""Joined in this order, they are the page's only script."""
COMPARISON = "comparison.html"
"""Where a comparison is written by default."""
_PLACE = re.compile(r"\{\{(\w+)\}\}")


@dataclass(frozen=True)
class Shown:
    """What a page shows: its facts, and the episodes to read, if any."""

    facts: Mapping[str, Any]
    episodes: Episodes = field(default_factory=Episodes)


def write_report(
    directories: Sequence[Path], out: Path | None, overrides: Sequence[str] = ()
) -> int:
    """Write the page of a run or an evaluation, or the comparison of several, and print where it is."""
    alone = len(directories) == 1
    if overrides and (not alone or is_evaluation(directories[0])):
        raise ConfigError(
            f"{overrides[0].partition('=')[0]}: keys of the config change the report of one run only"
        )
    file = out or (directories[0] / REPORT if alone else Path(COMPARISON))
    if not alone:
        shown = Shown(comparison(read_compared(directories)))
    elif is_evaluation(directories[0]):
        shown = Shown(*read_judged(directories[0]))
    else:
        shown = shown_run(directories[0], read_config(directories[0], overrides, besides=NEITHER))
    atomic_write_text(file, assemble(shown))
    what = f"{len(shown.episodes.rows):,} episodes" if alone else f"{len(directories)} compared"
    print(f"{file}: {what}, {file.stat().st_size / 1e6:.1f} MB; open it in a browser")
    return 0


def save_page(run_dir: Path, config: RunConfig, file: Path) -> Episodes:
    """Write a run's page; return the episodes that are in it. Raises ConfigError if the file's folder is not there."""
    if not file.parent.is_dir():
        raise ConfigError(f"no directory {file.parent}: name a file in an existing directory")
    if file.is_dir():
        raise ConfigError(
            f"{file} is a directory: name a file in it, such as {file / 'report.html'}"
        )
    page, episodes = make_page(run_dir, config)
    atomic_write_text(file, page)
    return episodes


def make_page(run_dir: Path, config: RunConfig) -> tuple[str, Episodes]:
    """Return the page of a run, and the episodes that are in it."""
    shown = shown_run(run_dir, config)
    return assemble(shown), shown.episodes


def shown_run(run_dir: Path, config: RunConfig) -> Shown:
    """Read what the page of a run shows."""
    view = RunView.read(run_dir, config)
    episodes = run_episodes(run_dir, config, view.files)
    return Shown(run_facts(view, config, episodes), episodes)


def run_facts(view: RunView, config: RunConfig, episodes: Episodes) -> dict[str, Any]:
    """Return the facts of a run's page, with what has to be said of its episodes."""
    shown = facts(view, config)
    shown["notices"] += episode_notices(episodes, config.model.name)
    return shown


def run_episodes(run_dir: Path, config: RunConfig, files: Files) -> Episodes:
    model_dir = known_model(config.model.name)
    ends = {end.ticket: (end.version, str(end)) for end in files.ends()}
    return collect(run_dir, ends, None if model_dir is None else TokenTexts.find(model_dir))


def assemble(shown: Shown, *, live: bool = False) -> str:
    """Return the page. A live one holds no episodes: its script asks the server that it came from, and nobody else."""
    style, script = _own("page.css"), "\n".join(map(_own, SCRIPTS))
    chunks = (
        f'<script type="application/gzip" id="chunk-{number}">{chunk}</script>'
        for number, chunk in enumerate([] if live else shown.episodes.chunks)
    )
    asks = "; connect-src 'self'" if live else ""
    parts = {
        "title": html.escape(f"{shown.facts['name']}: HorizonRL report"),
        # No network and no other script, whatever an episode's text contains.
        "policy": f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        f"base-uri 'none'; form-action 'none'{asks}",
        "style": style,
        "facts": inert_json({**shown.facts, "live": live}),
        "index": packed_index(shown.episodes),
        "chunks": "\n".join(chunks),
        "script": script,
    }
    # In one pass, so that an episode's text that looks like a place is not filled. By a function, because `sub` reads
    # backslashes in a text, and JSON is full of them.
    return _PLACE.sub(lambda match: parts[match[1]], _own("page.html"))


def packed_index(episodes: Episodes) -> str:
    return compress(json.dumps(episodes.index, ensure_ascii=False, separators=(",", ":")))


def inert_json(value: Any) -> str:
    """Return JSON in which nothing ends a script element or begins a comment: `<`, `>` and `&` are escaped."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def episode_notices(episodes: Episodes, model: str) -> Iterator[str]:
    """Yield sentences on what is missing among a run's episodes."""
    if not episodes.rows:
        yield "No episodes yet: the first step writes them."
    if episodes.stride > 1:
        yield f"The run has more episodes than a page can hold. Shown is one group in {episodes.stride}."
    if episodes.unreadable:
        yield (
            f"{episodes.unreadable} incomplete lines of episodes/ are left out: cut short by a crash, or being written."
        )
    if episodes.rows and known_model(model) is None:
        yield f"No tokenizer for {model!r} here, so tokens are not shown. Give its directory with --model.name DIR."
    if episodes.undecoded:
        yield f"The tokens of {episodes.undecoded} turns do not join to their text (another tokenizer): no shading."


def _own(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
