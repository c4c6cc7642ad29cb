"""Web navigation: find or change something on the sites of a small web, read as accessibility trees.

The observations and actions are WebArena's. The sites are our own; each episode has its own copy, and they are rendered
without a browser (docs/environments/webnav.md). A step takes a fraction of a millisecond. A world is drawn in a thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import validate_call

from horizonrl.envs.api import Step, TaskSpec
from horizonrl.envs.formats import Unreadable, WrittenFormat
from horizonrl.envs.game import MoveExpert, refuse_move
from horizonrl.envs.in_thread import in_thread
from horizonrl.envs.text_limits import MAX_OBSERVATION_CHARS, Chars
from horizonrl.envs.worlds.webnav.actions import COMMANDS
from horizonrl.envs.worlds.webnav.base import WebEnvironment
from horizonrl.envs.worlds.webnav.browser import HOME, Browser
from horizonrl.envs.worlds.webnav.community import Code, Forum
from horizonrl.envs.worlds.webnav.expert import WebExpert
from horizonrl.envs.worlds.webnav.page import Style
from horizonrl.envs.worlds.webnav.places import Map
from horizonrl.envs.worlds.webnav.shop import Admin, Shop
from horizonrl.envs.worlds.webnav.sites import SiteWeb
from horizonrl.envs.worlds.webnav.tasks import Drawn, draw_task, load_tasks
from horizonrl.envs.worlds.webnav.world import ME

SITES = (Shop, Admin, Map, Forum, Code)


@dataclass(frozen=True, slots=True)
class _Episode:
    drawn: Drawn
    browser: Browser


class WebNav(WebEnvironment[_Episode]):
    """One task on its own small web at a time.

    format: how the agent names its action (envs/formats.py)
    style: `full` is WebArena's notation on sites with hundreds of pages, `compact` is terse on sites with dozens;
        `agentgym` is `full` in the words of AgentGym's WebArena server, without the rules
    max_observation_chars: bound of every observation; a first observation that does not fit is a ConfigError
    """

    env_id = "webnav"
    version = "2"
    commands = COMMANDS
    rules = (
        f"You use the web for {ME}, who is signed in on every site. You see the open page as an accessibility tree. "
        "Each turn you take one action:"
    )
    brief = "Actions: click [id] | type [id] [text] [1] | scroll [down] | go_back | stop [answer]"

    @validate_call
    def __init__(
        self,
        *,
        format: WrittenFormat = "react",
        style: Style | Literal["agentgym"] = "full",
        max_observation_chars: Chars = MAX_OBSERVATION_CHARS,
    ) -> None:
        pages: Style = "full" if style == "agentgym" else style
        super().__init__(format, pages, max_observation_chars)
        self._to_agentgym = style == "agentgym"
        self.version = f"{WebNav.version}-{pages}"  # A style's worlds and answers are its own.

    @classmethod
    def tasks(cls) -> Sequence[TaskSpec]:
        """Return the 422 tasks, category by category."""
        return load_tasks()

    async def start(self, task_id: str) -> tuple[str, _Episode]:
        """Begin a task on sites that nobody has touched."""
        drawn = await in_thread(draw_task, task_id, self._style)
        sites = [site(drawn.world) for site in SITES]
        episode = _Episode(drawn, Browser(SiteWeb(sites, self._style), drawn.start, self._style))
        if self._to_agentgym:
            return self._show_page(episode, "None"), episode
        note = f"{HOME} lists the sites."
        if self._style == "compact":
            note = f"goto [{HOME}] lists the sites." if drawn.start == HOME else ""
        return self.introduce(drawn.task.intent, episode.browser.observe(), note), episode

    def read(self, text: str) -> str | Unreadable:
        """Return the action that a reply names. AgentGym's client leaves the fence around it."""
        fenced = self._to_agentgym and text.count("```") > 1
        return super().read(text.split("```")[1] if fenced else text)

    async def act(self, game: _Episode, name: str, arguments: dict[str, str], action: str) -> Step:
        """Take an action, or judge the answer of `stop` and the final state of the sites."""
        if name != "stop":
            game.browser.act(name, arguments)
            return refuse_move(self._show_page(game, action))
        drawn = game.drawn
        answer = drawn.task.answer
        answered = answer is None or answer.accepts(arguments["answer"])
        # The whole web is compared, so that a right answer does not pay for damage elsewhere.
        unchanged = drawn.world == drawn.wanted
        success = answered and unchanged
        return Step(
            "Stopped.",
            float(success),
            terminated=True,
            success=success,
            info={"answer_is_right": answered, "sites_are_right": unchanged},
        )

    def expert(self) -> MoveExpert:
        """Return an expert that plays from the beginning of the task."""
        return self._expert(WebExpert(self._current().drawn.task).advise)

    def _show_page(self, episode: _Episode, action: str) -> str:
        page = episode.browser.observe()
        if not self._to_agentgym:
            return page
        return f"OBSERVATION:\n{page}\nOBJECTIVE: {episode.drawn.task.intent}\nPREVIOUS ACTION: {action}"
