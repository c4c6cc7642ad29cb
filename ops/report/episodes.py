"""The episodes of a run as the page holds them: a small index of all, and their bodies in compressed chunks.

The index is read when the page opens; a chunk is decoded when one of its episodes is. Bodies go through memory step by
step, so that a long run's report needs no more of it than a short one's.
"""

import base64
import gzip
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from horizonrl.common.types import Kind, StopReason
from horizonrl.ops.report.tokens import TokenTexts
from horizonrl.ops.rundir.episodes import EpisodeFiles

Group = tuple[int, str, Sequence[Mapping[str, Any]]]
"""Step, ticket and records of a group."""
End = tuple[int, str]
"""The version that a ticket went into or judged, and what became of it."""
CHUNK_CHARS = 200_000
"""Of a chunk's JSON: decoded within some 10 ms in a browser, and long enough to compress well."""
MAX_BYTES = 400_000_000
"""Of `episodes/` files that go into a page as a whole; of longer ones every second, third, ... group does."""
_REASONED = re.compile(r"</think>\s*")
_ACTION = re.compile(
    r"(?=\bAction\s*:)|(?=\"function_name\")|```(?:python|py)?[ \t]*\n(?:[ \t]*#.*\n)*",
    re.IGNORECASE,
)
"""What stands before the action in the formats of `envs/formats.py`: react, function, code."""


@dataclass
class Episodes:
    """What the page knows of a run's episodes."""

    groups: list[list[Any]] = field(default_factory=list)
    """[ticket, env, task, horizon, step, end] each; the ticket's kind is the begin of its id."""
    rows: list[list[Any]] = field(default_factory=list)
    """[group, index, outcome, return, turns, tokens, oldest version, newest version] each, as the chunks have them.
    An expert is of no version."""
    starts: list[int] = field(default_factory=list)
    """The row with which each chunk begins."""
    chunks: list[str] = field(default_factory=list)
    """Gzipped JSON lists of bodies, in base64."""
    stride: int = 1
    """One group in so many is here."""
    unreadable: int = 0
    """Lines that were incomplete."""
    undecoded: int = 0
    """Turns whose tokens do not join to their text."""

    @property
    def index(self) -> dict[str, Any]:
        return {"groups": self.groups, "rows": self.rows, "starts": self.starts}


def collect(
    run_dir: Path, ends: Mapping[str, End], tokens: TokenTexts | None, max_bytes: int = MAX_BYTES
) -> Episodes:
    """Read a run's episodes, the held-out ones too; `ends` says of a ticket what became of it."""
    source = EpisodeFiles(run_dir, held_out=True)
    episodes = pack(
        source.groups(), ends, tokens, stride=max(1, math.ceil(source.size_bytes / max_bytes))
    )
    episodes.unreadable = source.unreadable
    return episodes


def pack(
    groups: Iterable[Group],
    ends: Mapping[str, End],
    tokens: TokenTexts | None = None,
    stride: int = 1,
) -> Episodes:
    """Return one in `stride` groups as the page holds them."""
    episodes = Episodes(stride=stride)
    bodies: list[str] = []
    for number, (step, ticket, records) in enumerate(groups):
        # Whole groups are left out, never single episodes: an advantage compares the episodes of a group.
        if number % episodes.stride:
            continue
        first = records[0]
        group = len(episodes.groups)
        version, end = ends.get(ticket, (step, "not settled"))
        episodes.groups.append(
            [ticket, first["env"], first["task"], first["horizon"], version, end]
        )
        if not bodies:
            episodes.starts.append(len(episodes.rows))
        for record in records:
            episodes.rows.append([group, *_row(record)])
            bodies.append(
                json.dumps(
                    _body(record, tokens, episodes), ensure_ascii=False, separators=(",", ":")
                )
            )
        if sum(map(len, bodies)) > CHUNK_CHARS:
            episodes.chunks.append(compress(f"[{','.join(bodies)}]"))
            bodies.clear()
    if bodies:
        episodes.chunks.append(compress(f"[{','.join(bodies)}]"))
    return episodes


def compress(text: str) -> str:
    """Return a text gzipped and in base64: nothing in it can end a script element."""
    # mtime=0: the same run gives the same bytes. "surrogatepass": JSON may hold lone surrogates, which UTF-8 refuses,
    # and one odd reply must not cost the whole page.
    return base64.b64encode(
        gzip.compress(text.encode("utf-8", "surrogatepass"), 6, mtime=0)
    ).decode()


def tell_outcome(record: Mapping[str, Any]) -> str:
    """Return how an episode went, in a word or two. A truncated episode is no failure: a limit ended it."""
    if record["success"]:
        return "success"
    if record["stop"] == "terminated":
        return "failure"
    if StopReason(record["stop"]).truncated:
        return f"truncated: {record['stop'].replace('env_truncated', 'environment')}"
    return f"broken: {record['stop']}"


def action_begins(text: str) -> int:
    """Return the place in a reply where the thought ends and the action begins; 0 when it is an action alone."""
    match = _REASONED.search(text) or _ACTION.search(text)
    return match.end() if match else 0


def _row(record: Mapping[str, Any]) -> list[Any]:
    turns = record["turns"]
    versions = (
        []
        if _by_expert(record)
        else [version for turn in turns for version in turn.get("versions", ())]
    )
    return [
        record["episode"],
        tell_outcome(record),
        record["return"],
        len(turns),
        sum(turn["tokens"] if "tokens" in turn else len(turn["ids"]) for turn in turns),
        min(versions, default=None),
        max(versions, default=None),
    ]


def _by_expert(record: Mapping[str, Any]) -> bool:
    """Return whether an episode is a demonstration: of no version, and nothing in it was sampled."""
    return str(record["ticket"]).startswith(f"{Kind.DEMO.value}-")


def _body(
    record: Mapping[str, Any], tokens: TokenTexts | None, episodes: Episodes
) -> dict[str, Any]:
    # Of no version of this run.
    if _by_expert(record) or any("versions" not in turn for turn in record["turns"]):
        turns = [_show_turn(turn, turn["text"]) | {"versions": []} for turn in record["turns"]]
    else:
        turns = [_turn(turn, tokens, episodes) for turn in record["turns"]]
    body = {
        "prompt": record["prompt"],
        "stop": record["stop"],
        "error": record["error"],
        "turns": turns,
    }
    if "refused" in record:
        body |= {"refused": record["refused"], "refusal": record["refusal"]}
    if "branches" in record:
        body["branches"] = record["branches"]
        for shown, turn in zip(turns, record["turns"], strict=True):
            shown |= {"branch": turn["branch"], "trained": turn["trained"]}
    return body


def _turn(turn: Mapping[str, Any], tokens: TokenTexts | None, episodes: Episodes) -> dict[str, Any]:
    """Return a turn for the page, with its tokens where they can be told; surprise is −100 ln p."""
    sampled: dict[str, Any] = {
        "versions": [[version, count] for version, _, count in turn["spans"]]
    }
    pieces = None if tokens is None else tokens.pieces(turn["ids"], turn["text"])
    if pieces is None:
        episodes.undecoded += tokens is not None
        return _show_turn(turn, turn["text"]) | sampled
    sampled["lengths"] = [_units(piece) for piece in pieces.texts]
    # Small integers instead of floats: there is one for each token.
    sampled["surprise"] = [round(-100 * logprob) for logprob in turn["logprobs"]]
    sampled["special"] = pieces.special
    return _show_turn(turn, "".join(pieces.texts)) | sampled


def _show_turn(turn: Mapping[str, Any], text: str) -> dict[str, Any]:
    action = _units(text[: action_begins(text)])
    return {
        "text": text,
        "observation": turn["observation"],
        "reward": turn["reward"],
        "action": action,
    }


def _units(text: str) -> int:
    """Return a text's length as JavaScript counts it."""
    # JavaScript counts UTF-16 units: an emoji is one character here and two there.
    return len(text.encode("utf-16-le", "surrogatepass")) // 2
