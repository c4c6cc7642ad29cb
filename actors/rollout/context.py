"""A conversation that has filled its context before the horizon ended its episode, and how it is shortened.

Place in the flow: the rollout asks for an **opening** when the next turn would not fit, and goes on from it in a new
branch of the episode (`rollout.context`, PROTOCOL.md). What was sampled stays as it was sampled: an opening repeats ids
or renders text, as context that is never trained again (token exactness). Pure functions; no policy, no environment.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

LEFT_OUT = "[{turns} left out]"
"""Stands, between the task and the observation that comes after the gap, for the turns that a window has dropped."""
SUMMARY_REQUEST = "[Context full: sum up what you did, know and have left to do.]"
"""Read in place of the last observation, which is read after the summary."""
SUMMARISED = "[Your summary of {turns}]"


@dataclass(frozen=True, slots=True)
class Exchange:
    """A turn as it stands in the context: what was sampled, and the answer, as ids and as text."""

    output_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    text: str
    answer: str


@dataclass(frozen=True, slots=True)
class Opening:
    """What a branch begins with: its ids, and the same as text for people."""

    ids: tuple[int, ...]
    text: str


Render = Callable[[str], tuple[int, ...]]
"""Renders a first message, with the system prompt before it, up to and including the generation prompt."""


def window(
    render: Render, task: str, exchanges: Sequence[Exchange], room_tokens: int
) -> Opening | None:
    """Return the task and the newest turns, as many as fit into half of `room_tokens`; None if no opening fits.

    Half, because each branch begins with what it repeats: a window that moved by one turn at a time would make every
    turn a branch, and the learner would read each turn as often as it stays in the window.
    """
    for dropped in range(1, len(exchanges) + 1):
        kept = exchanges[dropped:]
        tokens = sum(len(turn.output_ids) + len(turn.answer_ids) for turn in kept)
        if kept and tokens > room_tokens // 2:
            continue  # without rendering
        # The observation that the first of the kept turns answers is kept with it.
        message = f"{task}\n\n{LEFT_OUT.format(turns=counted(dropped))}\n\n{exchanges[dropped - 1].answer}"
        rendered = render(message)
        # With no turn kept, the whole room will do: nothing shorter is left to try.
        if len(rendered) + tokens <= (room_tokens // 2 if kept else room_tokens):
            ids = [
                *rendered,
                *(token for turn in kept for token in (*turn.output_ids, *turn.answer_ids)),
            ]
            return Opening(
                tuple(ids),
                "\n\n".join([message, *(f"{turn.text}\n\n{turn.answer}" for turn in kept)]),
            )
    return None


def summary(render: Render, task: str, turns: int, text: str, observation: str) -> Opening:
    """Return the task, the policy's own summary of its earlier turns, and the observation that it has yet to answer."""
    message = (
        f"{task}\n\n{SUMMARISED.format(turns=counted(turns))}\n{text.strip()}\n\n{observation}"
    )
    return Opening(render(message), message)


def counted(turns: int) -> str:
    return f"{turns} earlier turn{'' if turns == 1 else 's'}"
