"""A verifiers taskset of one turn: add two numbers."""

import re

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumsData(vf.TaskData):
    answer: int


class SumsTask(vf.Task[SumsData]):
    @vf.reward(weight=1.0)
    async def is_right(self, trace: vf.Trace) -> float:
        """1 if the last number of the reply is the sum, else 0."""
        reply = trace.assistant_messages[-1].content if trace.assistant_messages else ""
        return float(re.findall(r"\d+", str(reply))[-1:] == [str(self.data.answer)])


class SumsConfig(vf.TasksetConfig):
    count: int = 10
    """How many tasks there are."""


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    def load(self) -> list[SumsTask]:
        return [
            SumsTask(
                SumsData(prompt=f"What is {number} + {2 * number}?", answer=3 * number),
                self.config.task,
            )
            for number in range(self.config.count)
        ]
