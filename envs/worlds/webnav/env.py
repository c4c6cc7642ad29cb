"""Web navigation: find or change something on the sites of a small web, read as accessibility trees.

The observations and actions are WebArena's. The sites are our own; each episode has its own copy, and they are rendered
without a browser (docs/environments/webnav.md). A step takes a fraction of a millisecond. A world is drawn in a thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import validate_call

from horizonrl.common.errors import EnvironmentFailure
from horizonrl.envs.api import Observation, Step, TaskSpec
from horizonrl.envs.bounds import MAX_OBSERVATION_CHARS, Chars, clip, whole
from horizonrl.envs.formats import ActionFormat, Unreadable, WrittenFormat, explain, read_action
from horizonrl.envs.in_thread import in_thread
from horizonrl.envs.worlds.webnav.actions import COMMANDS, read_command
from horizonrl.envs.worlds.webnav.browser import HOME, Browser, Refused
from horizonrl.envs.worlds.webnav.community import Code, Forum
from horizonrl.envs.worlds.webnav.expert import WebExpert
from horizonrl.envs.worlds.webnav.page import Style
from horizonrl.envs.worlds.webnav.places import Map
from horizonrl.envs.worlds.webnav.shop import Admin, Shop
from horizonrl.envs.worlds.webnav.sites import SiteWeb
from horizonrl.envs.worlds.webnav.tasks import Drawn, draw_task, load_tasks
from horizonrl.envs.worlds.webnav.world import ME

SITES = (Shop, Admin, Map, Forum, Code)
_FULL = """\
You use the web for {me}, who is signed in on every site. You see the open page as an accessibility tree. Each turn \
you take one action:
{actions}
{home} lists the sites.
{reply}

OBJECTIVE: {intent}

{page}"""
_COMPACT = "Actions: click [id] | type [id] [text] [1] | scroll [down] | go_back | stop [answer]"
_COMPACT_REPLY = {"plain": "", "react": "Reply in two lines:\nThought: why\nAction: action"}


@dataclass(frozen=True, slots=True)
class _Episode:
    drawn: Drawn
    browser: Browser


class WebNav:
    """One task on its own small web at a time.

    format: how the agent names its action (envs/formats.py)
    style: `full` is WebArena's notation on sites with hundreds of pages, `compact` is terse on sites with dozens;
        `agentgym` is `full` in the words of AgentGym's WebArena server, without the rules
    max_observation_chars: bound of every observation; a first observation that does not fit is a ConfigError
    """

    env_id: ClassVar[str] = "webnav"
    version: str = "2"

    @validate_call
    def __init__(
        self,
        *,
        format: WrittenFormat = "react",
        style: Style | Literal["agentgym"] = "full",
        max_observation_chars: Chars = MAX_OBSERVATION_CHARS,
    ) -> None:
        self._to_agentgym = style == "agentgym"
        self._style: Style = "full" if style == "agentgym" else style
        self.version = (
            f"{WebNav.version}-{self._style}"  # A style's worlds and answers are its own.
        )
        self._format: ActionFormat = format
        self._max_chars = max_observation_chars
        self._episode: _Episode | None = None

    @classmethod
    def tasks(cls) -> Sequence[TaskSpec]:
        """Return the 422 tasks, category by category."""
        return load_tasks()

    async def reset(self, task_id: str) -> Observation:
        """Begin a task on sites that nobody has touched."""
        drawn = await in_thread(draw_task, task_id, self._style)
        sites = [site(drawn.world) for site in SITES]
        episode = _Episode(drawn, Browser(SiteWeb(sites, self._style), drawn.start, self._style))
        text = whole(self._first(episode), task_id, self._max_chars)
        self._episode = episode
        return Observation(text)

    async def step(self, text: str) -> Step:
        """Take the one action that the text names."""
        episode = self._current()
        text = text.split("```")[1] if self._to_agentgym and text.count("```") > 1 else text
        match read_action(text, self._format, COMMANDS):
            case Unreadable(reason):
                return Step(clip(reason, self._max_chars), 0.0, terminated=False)
            case str(action):
                command = read_command(action)
        if command is None:
            answer = (
                f"There is no such action. The actions are: {', '.join(c.words for c in COMMANDS)}."
            )
            return Step(clip(answer, self._max_chars), 0.0, terminated=False)
        name, arguments = command
        if name == "stop":
            return self._stop(episode, arguments["answer"])
        try:
            episode.browser.act(name, arguments)
        except Refused as refused:
            return Step(clip(str(refused), self._max_chars), 0.0, terminated=False)
        return Step(clip(self._show_page(episode, action), self._max_chars), 0.0, terminated=False)

    def expert(self) -> WebExpert:
        """Return an expert that plays from the beginning of the task."""
        return WebExpert(self._current().drawn.task, self._format)

    async def close(self) -> None:
        self._episode = None

    def _stop(self, episode: _Episode, answer: str) -> Step:
        """Judge the answer and the final state of the sites."""
        self._episode = None
        drawn = episode.drawn
        answered = drawn.task.answer is None or drawn.task.answer.accepts(answer)
        # The whole web is compared, so that a right answer does not pay for damage elsewhere.
        unchanged = drawn.world == drawn.wanted
        success = answered and unchanged
        judged: dict[str, str | int | float | bool] = {
            "answer_is_right": answered,
            "sites_are_right": unchanged,
        }
        return Step("Stopped.", float(success), terminated=True, success=success, info=judged)

    def _current(self) -> _Episode:
        if self._episode is None:
            raise EnvironmentFailure(
                "no episode has begun or it is over: reset before step and expert"
            )
        return self._episode

    def _show_page(self, episode: _Episode, action: str) -> str:
        page = episode.browser.observe()
        if not self._to_agentgym:
            return page
        return f"OBSERVATION:\n{page}\nOBJECTIVE: {episode.drawn.task.intent}\nPREVIOUS ACTION: {action}"

    def _first(self, episode: _Episode) -> str:
        if self._to_agentgym:
            return self._show_page(episode, "None")
        intent, page = episode.drawn.task.intent, episode.browser.observe()
        reply = explain(self._format, COMMANDS)
        if self._style == "full":
            actions = "\n".join(
                f"{c.words.replace('{', '').replace('}', '')}: {c.meaning}" for c in COMMANDS
            )
            return _FULL.format(
                me=ME, actions=actions, home=HOME, reply=reply, intent=intent, page=page
            )
        sites = f"goto [{HOME}] lists the sites." if episode.drawn.start == HOME else ""
        return "\n".join(
            filter(
                None,
                (_COMPACT, sites, _COMPACT_REPLY.get(self._format, reply), f"Task: {intent}", page),
            )
        )
