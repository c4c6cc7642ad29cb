"""Graders for the tests."""

from horizonrl.envs.mcp.tasks import Answered


def same(answered: Answered) -> bool:
    """Return whether the answer is the task's own."""
    return answered.answer == (answered.task.model_extra or {}).get("answer")


async def shelved(answered: Answered) -> float:
    """Return 1 if the thing of the task is where it belongs, as a tool tells that the agent may not see."""
    wanted = answered.task.model_extra or {}
    return float(await answered.call("look", {"place": wanted["place"]}) == wanted["thing"])


def failing(answered: Answered) -> float:
    raise RuntimeError("no red ink")


def undecided(answered: Answered) -> None:
    return None
