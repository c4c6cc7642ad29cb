"""A verifiers taskset of one turn: add two numbers."""

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumsData(vf.TaskData):
    answer: int


class SumsTask(vf.Task[SumsData]):
    @vf.reward(weight=1.0)
    async def is_right(self, trace: vf.Trace) -> float:
        """1 for the sum, 0 for anything else."""
        reply = trace.assistant_messages[-1].content if trace.assistant_messages else ""
        return float(str(reply).strip() == str(self.data.answer))


class SumsConfig(vf.TasksetConfig):
    count: int = 10
    """How many tasks there are."""


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    def load(self) -> list[SumsTask]:
        return [
            SumsTask(
                SumsData(prompt=f"What is {number} + {2 * number}? Reply with the number alone.", answer=3 * number),
                self.config.task,
            )
            for number in range(self.config.count)
        ]
