"""`python -m horizonrl.ops.pages.studies`: write a page of docs/studies/ from each committed study.

A study is the `results.json` of `horizonrl study learning`, kept as docs/studies/NAME.json. Its page is
docs/studies/NAME.md: how the study was made, a conclusion in words, and every number in tables.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horizonrl.ops.studies.contrasts import END
from horizonrl.ops.studies.report import SECONDS, ReportOptions, results_to_markdown

DIRECTORY = Path(__file__).parents[2] / "docs" / "studies"
INTERVALS = "Intervals (95 %) and p: [how to read them](../evidence.md#how-to-read-the-numbers)."


@dataclass(frozen=True, slots=True)
class Note:
    """What a page says besides its numbers, and which of them it shows (`ReportOptions`)."""

    title: str
    conclusion: str
    axes: tuple[str, ...] = (END,)
    share_of: str | None = None
    played: bool = False
    page: str | None = None
    """The page's name, where NAME.md is written by hand."""


NOTES: Mapping[str, Note] = {
    "asynchrony": Note(
        "Synchronous and asynchronous training",
        "Training on groups up to 8 versions old makes the same updates in a fraction of the time. A loss of several "
        'points of success is not excluded. The runs have `rl.stale = "drop"`, so slow tasks are trained less. The '
        "synchronous arm replaces groups without variance, and so plays more.",
        share_of=SECONDS,
    ),
    "context": Note(
        "A full context: stop, window, summarise",
        "A longer horizon helps only if the context can hold it, or with a window. This model's summaries are poor.",
        axes=(END, "environment_steps"),
    ),
    "curriculum": Note(
        "Curriculum: the pocket model",
        "`adaptive` needs fewer environment steps for equal success. At equal updates no difference shows.",
        axes=(END, "environment_steps", SECONDS),
        share_of="environment_steps",
    ),
    "curriculum-scenarios": Note(
        "Curriculum: games and search",
        "`adaptive` makes as many updates with fewer environment steps. No difference in success is significant.",
        axes=(END, "environment_steps"),
        share_of="environment_steps",
    ),
    "curriculum-smollm2": Note(
        "Curriculum: SmolLM2-135M",
        "`adaptive` needs fewer environment steps for equal success; `adaptive-1` nearly matches its groups' age.",
        axes=(END, "environment_steps"),
        share_of="environment_steps",
    ),
    "estimators": Note(
        "Nine advantages",
        "No advantage differs from `grpo` significantly. Those that compare siblings replace groups without variance, "
        "and so play four times as much for as many updates.",
        axes=(END, "environment_steps"),
    ),
    "horizon-claim": Note(
        "The horizon claim: the confirmation",
        "The verdict is [open](horizon-claim.md#the-confirmation).",
        axes=(END, "processed_tokens"),
        played=True,
        page="horizon-confirmation",
    ),
    "horizon-screen": Note(
        "The horizon claim: the screen",
        "It [names the cell](horizon-claim.md#the-screen) of the confirmation, and tests nothing.",
        axes=(END, "processed_tokens"),
    ),
    "horizons": Note(
        "Five horizon schedules",
        "No schedule differs from `long` significantly. The context ended most of the truncated episodes of `long`.",
        axes=(END, "processed_tokens"),
        played=True,
    ),
    "losses": Note(
        "Six losses",
        "Each loss improves the model. None differs from `ppo` significantly at this learning rate. `gspo` was run "
        "with its former ratio, to the actors' logprobs.",
    ),
    "make-train": Note(
        "The recipe of `make train`",
        "Three steps of imitation, then twelve of RL. Rates and tasks were chosen on validation tasks. There were "
        "twenty steps of RL until a run on test showed that the later ones find few groups that differ. Seed 0 ran "
        "beside other work.",
    ),
    "scenarios": Note(
        "The five scenarios",
        "Every estimate is a gain. Corrected over the six recipes, none is significant. `embodied` was lengthened "
        "because shorter runs were not significant, so its p is not a test.",
    ),
    "staleness": Note(
        "Staleness: four losses",
        "`ppo` and `dppo` survive groups 16 versions behind. Without a trust region around the behaviour policy, runs "
        "collapse.",
    ),
    "table": Note(
        "The paper's 27 tasks, on counterparts",
        "One run of the mix: up to five test tasks per row, seven episodes each, at temperature 0.7. Wilson's "
        "intervals over episodes are too narrow, because the seven of a task resemble each other. Turns are before and "
        "after RL. With tasks as the unit, no scenario gains significantly.",
    ),
}
"""By the study's name. Conclusions hold no numbers: those are in the tables."""


def pages() -> dict[Path, str]:
    """Return the text of each page, by its path."""
    return {
        DIRECTORY / f"{NOTES[study.stem].page or study.stem}.md": page(
            study.stem, json.loads(study.read_text(encoding="utf-8"))
        )
        for study in sorted(DIRECTORY.glob("*.json"))
    }


def page(name: str, results: Mapping[str, Any]) -> str:
    """Return the page of a study."""
    note = NOTES[name]
    parts = [
        f"# {note.title}",
        f"Generated from [{name}.json]({name}.json).",
        note.conclusion,
        *results_to_markdown(
            results,
            ReportOptions(note.axes, note.share_of, note.played, tables=True, method=INTERVALS),
        ),
    ]
    if (DIRECTORY.parent / "images" / f"{name}.svg").exists():
        parts.append(f"![{note.title}](../images/{name}.svg)")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
