"""What web environments share, whatever serves their pages: the words of actions, refusals and first observations."""

from abc import abstractmethod
from typing import ClassVar, TypeVar

from horizonrl.envs.api import Step
from horizonrl.envs.formats import WrittenFormat, explain, explain_briefly
from horizonrl.envs.game import TurnEnvironment, list_commands, refuse_move
from horizonrl.envs.worlds.webnav.actions import read_command
from horizonrl.envs.worlds.webnav.browser import Refused
from horizonrl.envs.worlds.webnav.page import Style

P = TypeVar("P")


class WebEnvironment(TurnEnvironment[P]):
    """Plays a task on web pages by WebArena's actions."""

    rules: ClassVar[str]
    """What stands before the list of the actions."""
    brief: ClassVar[str]
    """The actions that suffice, for small models."""

    def __init__(self, format: WrittenFormat, style: Style, max_observation_chars: int) -> None:
        super().__init__(format, max_observation_chars)
        self._style: Style = style

    @abstractmethod
    async def act(self, game: P, name: str, arguments: dict[str, str], action: str) -> Step:
        """Take the action of a name, written as `action`. Raises Refused, without any change, if it cannot be taken."""

    async def follow(self, game: P, action: str) -> Step:
        """Take the action that has these words."""
        command = read_command(action, self.commands)
        if command is None:
            words = ", ".join(command.words for command in self.commands)
            return refuse_move(f"There is no such action. The actions are: {words}.")
        try:
            return await self.act(game, *command, action)
        except Refused as refused:
            return refuse_move(str(refused))

    def introduce(self, objective: str, page: str, note: str = "") -> str:
        """Return the first observation; the note stands below the actions."""
        if self._style == "compact":
            reply = explain_briefly(self._format, self.commands, "action")
            lines = (self.brief, note, reply, f"Task: {objective}", page)
        else:
            actions, reply = list_commands(self.commands), explain(self._format, self.commands)
            task = f"\nOBJECTIVE: {objective}\n\n{page}"
            lines = (self.rules, actions, note, reply, task)
        return "\n".join(filter(None, lines))
