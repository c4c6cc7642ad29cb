"""`horizonrl report`: a run as one HTML page that needs no network and no server.

Flow: run directory → **page**. Whatever a run has written reaches the page as data, never as markup: as JSON without
`<`, or as base64. The page's content security policy allows one script and one style, by digest, and nothing else.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError
from horizonrl.common.run_dir import REPORT
from horizonrl.ops.report.episodes import Episodes, collect, packed
from horizonrl.ops.report.facts import Files, ends, facts
from horizonrl.ops.report.tokens import TokenTexts
from horizonrl.ops.run.directory import read_config
from horizonrl.ops.run.models import known_model

SCRIPTS = ("elements.js", "store.js", "charts.js", "overview.js", "list.js", "reader.js", "app.js")
"""Joined in this order, they are the page's only script."""
_PLACE = re.compile(r"\{\{(\w+)\}\}")


def write_report(run_dir: Path, out: Path | None, overrides: Sequence[str] = ()) -> int:
    """Write a run's page and print where it is."""
    config = read_config(run_dir, overrides)
    file = out or run_dir / REPORT
    if not file.parent.is_dir():
        raise ConfigError(f"no directory {file.parent}: --out must name a file in an existing directory")
    episodes = save_page(run_dir, config, file)
    print(f"{file}: {len(episodes.rows):,} episodes, {file.stat().st_size / 1e6:.1f} MB; open it in a browser")
    return 0


def save_page(run_dir: Path, config: RunConfig, file: Path) -> Episodes:
    """Write a run's page; return the episodes that are in it."""
    page, episodes = make_page(run_dir, config)
    incoming = file.with_name(f".{file.name}.incoming")
    incoming.write_text(page, encoding="utf-8")
    # Whoever opens the page in this moment gets a whole one.
    incoming.rename(file)
    return episodes


def make_page(run_dir: Path, config: RunConfig) -> tuple[str, Episodes]:
    """Return the page of a run, and the episodes that are in it."""
    files = Files.read(run_dir)
    model_dir = known_model(config.model.name)
    episodes = collect(run_dir, ends(files), None if model_dir is None else TokenTexts.find(model_dir))
    shown = facts(config, files)
    shown["notices"] += _notices(episodes, config.model.name, found=model_dir is not None)
    style, script = _own("page.css"), "\n".join(map(_own, SCRIPTS))
    chunks = (
        f'<script type="application/gzip" id="chunk-{number}">{chunk}</script>'
        for number, chunk in enumerate(episodes.chunks)
    )
    parts = {
        "title": html.escape(f"{config.run.name}: HorizonRL report"),
        # No network and no other script, whatever an episode's text contains.
        "policy": f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'",
        "style": style,
        "facts": inert_json(shown),
        "index": packed(json.dumps(episodes.index, ensure_ascii=False, separators=(",", ":"))),
        "chunks": "\n".join(chunks),
        "script": script,
    }
    # In one pass, so that an episode's text that looks like a place is not filled. By a function, because `sub` reads
    # backslashes in a text, and JSON is full of them.
    return _PLACE.sub(lambda place: parts[place[1]], _own("page.html")), episodes


def inert_json(value: Any) -> str:
    """Return JSON in which nothing ends a script element or begins a comment: `<`, `>` and `&` are escaped."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _notices(episodes: Episodes, model: str, *, found: bool) -> list[str]:
    notices = []
    if not episodes.rows:
        notices.append("No episodes yet: the first step writes them.")
    if episodes.stride > 1:
        notices.append(f"The run has more episodes than a page can hold. Shown is one group in {episodes.stride}.")
    if episodes.unreadable:
        notices.append(
            f"{episodes.unreadable} incomplete lines of episodes/ are left out: cut short by a crash, or being written."
        )
    if episodes.untold:
        notices.append("Some episodes have no token ids, so their turns are not shaded.")
    elif episodes.rows and not found:
        notices.append(
            f"No tokenizer for {model!r} here, so tokens are not shown. Give its directory with --model.name DIR."
        )
    if episodes.undecoded:
        notices.append(
            f"The tokens of {episodes.undecoded} turns do not join to their text (another tokenizer): no shading."
        )
    return notices


def _own(name: str) -> str:
    return (resources.files(__package__) / name).read_text()


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
