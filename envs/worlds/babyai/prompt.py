"""What the agent reads about a mission, a view and its actions, in four styles."""

from typing import Literal

from horizonrl.envs.formats import ActionFormat, explain, explain_briefly
from horizonrl.envs.worlds.babyai.sight import Cell
from horizonrl.envs.worlds.babyai.view import View
from horizonrl.envs.worlds.babyai.world import CHECK, COMMANDS, GridWorld

Style = Literal["full", "compact", "compat", "agentgym"]
"""`compat` has AgentGym's words and rules. `agentgym` has only its words, because AgentGym's clients add the rules."""

_FULL = """\
You are in a world of rooms and doors, and are given a goal. You see what is in front of you, up to six steps ahead and
three to each side. Each turn you take one action:
turn left, turn right, move forward
go to OBJECT: walk up to an object or a door in sight, such as red ball 1
pickup OBJECT: walk up to an object and pick it up; you can carry one
drop: put down what you carry, in front of you
go through DOOR: walk into an open door
toggle and go through DOOR: open a closed door and walk into it; a locked one needs a key of its color in your hands
toggle: open or close the door, or open the box, right in front of you
check available actions: list what you can do now"""
_COMPACT = """\
Actions: turn left | turn right | move forward | go to X | pickup X | drop | toggle | go through X | \
toggle and go through X"""
_COMPAT = " \n\n- ".join(
    (
        "You are an exploration master that wants to finish every goal you are given. Every round I will give you an "
        "observation, and you have to respond an action and your thought based on the observation to finish the given "
        "task. You are placed in a room and you need to accomplish the given goal with actions.\n\nYou can use the "
        "following actions:",
        "turn right",
        "turn left",
        "move forward",
        "go to <obj> <id>",
        "pick up <obj> <id>",
        "go through <door> <id>: <door> must be an open door.",
        "toggle and go through <door> <id>: <door> can be a closed door or a locked door. If you want to open a locked "
        "door, you need to carry a key that is of the same color as the locked door.",
        "toggle: there is a closed or locked door right in front of you and you can toggle it.",
    )
)
_COMPAT_REPLY = "Your response should use the following format:\nThought:\n<Your Thought>\n\nAction:\n<Your Action>"


def first_observation(world: GridWorld, style: Style, action_format: ActionFormat) -> str:
    """Return the rules, the goal and the first view. `compat` drops the order of a goal's parts, as AgentGym does."""
    reply = explain(action_format, COMMANDS)
    seen = observation(world, "", style)
    match style:
        case "full":
            return f"{_FULL}\n{reply}\n\nGoal: {world.mission}\n{seen}"
        case "compact":
            reply = explain_briefly(action_format, COMMANDS, "action")
            return "\n".join(filter(None, (_COMPACT, reply, f"Goal: {world.mission}", seen)))
        case "compat":
            reply = _COMPAT_REPLY if action_format == "react" else reply
            return f"{_COMPAT}\n{reply}\n\n{_goal(world)}\n{seen}"
        case "agentgym":
            return f"{_goal(world)}\n{seen}"


def observation(world: GridWorld, answer: str, style: Style) -> str:
    """Return the answer or, without one, the view; unless compact, also the available actions."""
    actions = [*world.view.actions, CHECK]
    match style:
        case "full":
            return f"{answer or _tell(world.view)}\nActions: {', '.join(actions)}"
        case "compact":
            return answer or _note(world.view)
        case "compat" | "agentgym":
            done = "\n The task is completed." if world.completed else ""
            listed = ", ".join(f'"{action}"' for action in actions)
            return f"{answer or _tell_compat(world.view) + done}\nAvailable actions: [{listed}]"


def _goal(world: GridWorld) -> str:
    return f"Your goal: {world.mission.replace('then', 'and').replace('after you', 'and')}"


def _tell(view: View) -> str:
    things = ", ".join(f"{thing.name} ({_place(thing.cell, ', ')})" for thing in view.things)
    barrier = (
        f" Straight ahead is a {view.barrier.kind}, {_steps(view.barrier.cell[0])} away."
        if view.barrier
        else ""
    )
    return (
        f"You see {things or 'nothing'}.{barrier} You carry {_describe_carried(view) or 'nothing'}."
    )


def _note(view: View) -> str:
    notes = [f"{thing.name}: {_place(thing.cell, ' ')}" for thing in view.things]
    if view.barrier is not None and view.barrier.kind == "wall":
        notes.append(f"wall: {view.barrier.cell[0]} ahead")
    if view.carrying is not None:
        notes.append(f"carrying {_describe_carried(view)}")
    return "; ".join(notes) or "nothing in sight"


def _tell_compat(view: View) -> str:
    nothing = "You cannot see any objects within sight."
    sentences = [
        "In front of you in this room, you can see several objects: "
        if view.blocked or view.things
        else nothing
    ]
    for thing in view.things:
        ahead, right = thing.cell
        sentences.append(f"There is a {thing.name} ")
        if right == 0:
            sentences.append(f"right in front of you {ahead} steps away.  ")
        else:
            side = "right" if right > 0 else "left"
            sentences.append(
                f"{ahead} steps in front of you and {abs(right)} steps to your {side}.  "
            )
    sentences.append("The room has walls around you. ")
    if view.barrier is not None:
        sentences.append(
            f"You are facing a {view.barrier.kind} {view.barrier.cell[0]} steps away. "
        )
    carried = _describe_carried(view)
    sentences.append(
        f"You are carrying a {carried}." if carried else "You are not carrying anything."
    )
    return "".join(sentences)


def _place(cell: Cell, between: str) -> str:
    ahead, right = cell
    side = f"{abs(right)} {'right' if right > 0 else 'left'}" if right else ""
    return between.join(filter(None, (f"{ahead} ahead" if ahead else "", side)))


def _steps(count: int) -> str:
    return f"{count} step{'s' * (count != 1)}"


def _describe_carried(view: View) -> str:
    return f"{view.carrying.colour} {view.carrying.kind}" if view.carrying else ""
