"""The grid of one episode. It takes the actions that the view offers and knows when the mission is over."""

from dataclasses import dataclass

from minigrid.core.actions import Actions
from minigrid.envs.babyai.core.verifier import Instr, SeqInstr

from horizonrl.envs.formats import Command
from horizonrl.envs.worlds.babyai.levels import generate
from horizonrl.envs.worlds.babyai.sight import Sight, look
from horizonrl.envs.worlds.babyai.view import Moves, View, see

COMMANDS = (
    Command("turn_left", "turn left", "turn to the left"),
    Command("turn_right", "turn right", "turn to the right"),
    Command("move_forward", "move forward", "take one step"),
    Command(
        "go_to", "go to {object}", "walk up to an object or a door in sight, such as red ball 1"
    ),
    Command("pickup", "pickup {object}", "walk up to an object and pick it up; you can carry one"),
    Command("go_through", "go through {door}", "walk into an open door, such as red open door 1"),
    Command(
        "toggle_and_go_through",
        "toggle and go through {door}",
        "walk up to a closed door, open it and walk into it; a locked one needs a key of its color",
    ),
    Command("toggle", "toggle", "open or close the door, or open the box, right in front of you"),
    Command("drop", "drop", "put down what you carry, in front of you"),
    Command("check", "check available actions", "list what you can do now"),
)
CHECK = "check available actions"
MAX_ACTION_CHARS = 100
"""More than enough: the longest action of any view has fewer than 60 characters."""


@dataclass(frozen=True, slots=True)
class Outcome:
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False


class GridWorld:
    """A level of minigrid with text actions. Each is a few of minigrid's moves, and the step limit counts the moves."""

    def __init__(self, task_id: str) -> None:
        self.task_id = task_id
        self.level = generate(task_id)
        # Rendering the unused image would take longer than the step itself.
        self.level.gen_obs = lambda: None
        self.sight = look(self.level)
        self.view = self._view(self.sight)
        self.completed = False

    @property
    def mission(self) -> str:
        return str(self.level.mission)

    @property
    def steps(self) -> int:
        """The number of minigrid's moves so far; the limit is `level.max_steps`."""
        return int(self.level.step_count)

    @property
    def state(self) -> str:
        """The grid, where the agent stands and looks, what it carries, and which parts of the mission are done."""
        level = self.level
        carried = level.carrying.encode() if level.carrying else ()
        grid, done = level.grid.encode().tobytes().hex(), _describe_done(level.instrs)
        return f"{grid} {level.agent_pos} {level.agent_dir} {carried}{done}"

    def follow(self, written: str) -> tuple[Outcome, str]:
        """Take the named action, or answer why it cannot be taken."""
        action = plain(written)
        if action in self.view.actions:
            return self.act(action), ""
        return self.reject(
            self.listing() if action.startswith("check") else self.view.why_not(action)
        )

    def reject(self, reason: str) -> tuple[Outcome, str]:
        """Answer an action that changes nothing."""
        return Outcome(), reason

    def listing(self) -> str:
        """Return the answer to `check available actions`."""
        return f"You can take the following actions: {', '.join([*self.view.actions, CHECK])}"

    def act(self, action: str) -> Outcome:
        """Take one of the view's actions: make its moves until one fails or the mission is over."""
        outcome = self._move(self.view.actions[action])
        self.sight = look(self.level)
        self.view = self._view(self.sight)
        self.completed = outcome.terminated or outcome.truncated
        return outcome

    def _move(self, moves: Moves) -> Outcome:
        for move in moves:
            stood = tuple(self.level.agent_pos)
            _, reward, terminated, truncated, _ = self.level.step(Actions(move))
            if terminated or truncated:
                # minigrid may report both in one move; a mission that is over was not cut off.
                return Outcome(float(reward), terminated, truncated and not terminated)
            if move == Actions.forward and tuple(self.level.agent_pos) == stood:
                break  # the path led through a hidden cell that turned out to be blocked
        return Outcome()

    def _view(self, sight: Sight) -> View:
        return see(sight)


def _describe_done(mission: Instr) -> str:
    """Return a sign for each part of a mission of several: these are done once, wherever the agent goes after it."""
    if not isinstance(mission, SeqInstr):
        return ""
    parts = ((mission.instr_a, mission.a_done), (mission.instr_b, mission.b_done))
    return "".join(f" {int(done == 'success')}{_describe_done(part)}" for part, done in parts)


def plain(written: str) -> str:
    """Return an action in the view's words."""
    words = " ".join(written[:MAX_ACTION_CHARS].lower().split()).strip(" .!`'\"*[]()<>")
    return words.replace("pick up ", "pickup ", 1)
