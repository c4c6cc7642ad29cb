"""Deep search: answer a question that no single page answers, by searching. The reward is 1 for a right answer, else 0.

The world, its pages and its questions are fictional, so that no model can know an answer without searching.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field, validate_call

from horizonrl.common.errors import ConfigError
from horizonrl.envs.api import Step, TaskSpec
from horizonrl.envs.formats import ActionFormat, Command, Unreadable
from horizonrl.envs.game import GameEnvironment, Move, Style, refuse_move
from horizonrl.envs.text_limits import MAX_OBSERVATION_CHARS, Chars, clip
from horizonrl.envs.worlds.deepsearch.index import Index, Page
from horizonrl.envs.worlds.deepsearch.library import Questions, load, load_questions
from horizonrl.envs.worlds.deepsearch.questions import Question, normalize

COMMANDS = (
    Command("search", "<search>{query}</search>", "find pages"),
    Command(
        "answer",
        "<answer>{text}</answer>",
        "answer the question in a few words, without a sentence around them",
    ),
)
PAGE_CHARS = {"full": 1_000, "compact": 200, "agentgym": 1_000}
"""Characters of a page that a search result shows."""
RESULTS = {"full": 3, "compact": 1, "agentgym": 3}

_AGENTGYM_PROMPT = """\
You must reason inside <think>...</think> first. If you do not have enough knowledge, issue a <search>...</search> and \
then STOP. Do not generate <information> or <answer> yet. Wait for external input wrapped in \
<information>...</information>. After receiving information, reason again in <think>. If confident, output your final \
answer in <answer>...</answer>. Do not output <answer> before receiving <information> unless you are fully confident. \
If you find no further external knowledge needed, you can directly provide the answer inside <answer> and </answer>, \
without detailed illustrations. For example, <answer> Beijing </answer>. Follow this process every time.

 Question: {question}"""
_OPENED = {name: re.compile(f"<{name}>", re.IGNORECASE) for name in ("search", "answer")}
_CLOSED = {name: re.compile(f"</{name}>", re.IGNORECASE) for name in _OPENED}


@dataclass
class Inquiry:
    """One question, until it is answered."""

    invalid: ClassVar[str] = "Write <search>words</search> or <answer>text</answer>."
    question: Question
    index: Index
    results: int
    page_chars: int
    single_answer: bool
    searched: set[str] = field(default_factory=set)

    def follow(self, action: str) -> Step:
        """Search, or judge an answer."""
        match first_tag(action):
            case ("search", query):
                return refuse_move(self._search(query.strip()))
            case ("answer", answer):
                return self._judge(answer)
        return refuse_move(self.invalid)

    def _search(self, query: str) -> str:
        self.searched.add(query)
        pages = self.index.search(query, self.results)
        return (
            "\n".join(self._show(*numbered) for numbered in enumerate(pages, 1))
            or f"Nothing found for {clip(query)!r}."
        )

    def _show(self, number: int, page: Page) -> str:
        text = clip(page.text, self.page_chars)
        return text if self.results == 1 else f"{number}. {page.title}: {text}"

    def _judge(self, answer: str) -> Step:
        right = normalize(answer) in map(normalize, self.question.answers)
        if not right and not self.single_answer:
            return refuse_move("That is not the answer. Search on, or answer again.")
        return Step(
            "Right." if right else "Wrong.", reward=float(right), terminated=True, success=right
        )

    def advise(self) -> Move:
        """Look up each step towards the answer that has not been searched yet, then answer."""
        for name in self.question.searches:
            if name not in self.searched:
                return Move(f"<search>{name}</search>", f"I have to look up {name}.")
        return Move(f"<answer>{self.question.answers[0]}</answer>", "Now I know the answer.")


class AgentGymInquiry(Inquiry):
    """One question, answered in the words of AgentGym's SearchQA."""

    invalid = (
        "Your previous action is invalid. If you want to search, you should put the query between <search> and "
        "</search>. If you want to give the final answer, you should put the answer between <answer> and </answer>. "
        "Please try again."
    )

    def _search(self, query: str) -> str:
        self.searched.add(query)
        pages = self.index.search(query, self.results)
        shown = (
            f"Doc {number}(Title: {page.title}) {page.text}" for number, page in enumerate(pages, 1)
        )
        return f"<information>{clip(chr(10).join(shown), self.page_chars * self.results)}</information>"

    def _judge(self, answer: str) -> Step:
        step = super()._judge(answer)
        right = "Congratulations! You have answered the question correctly."
        wrong = "Sorry, your answer is incorrect. Please try again."
        return replace(step, observation=right if step.success else wrong)


class DeepSearch(GameEnvironment[Inquiry]):
    """One question at a time.

    corpus, questions: your own pages and questions, two JSONL files (see library.py); give both or neither
    single_answer: whether the first answer ends the episode; if not, the agent may answer again after a wrong answer
    results: number of pages that a search shows; default: 3, or 1 in the compact style
    format: how the agent names its action (envs/formats.py); in a plain reply the first tag counts, wherever it is
    style: `compact` has short pages, for small models and short contexts
    max_observation_chars: bound of every observation
    """

    env_id = "deepsearch"
    version = "1"
    commands = COMMANDS

    @validate_call
    def __init__(
        self,
        *,
        corpus: Path | None = None,
        questions: Path | None = None,
        single_answer: bool = True,
        results: Annotated[int, Field(ge=1, le=20)] | None = None,
        format: ActionFormat = "react",
        style: Style = "full",
        max_observation_chars: Chars = MAX_OBSERVATION_CHARS,
    ) -> None:
        super().__init__(format, style, max_observation_chars)
        if (corpus is None) != (questions is None):
            raise ConfigError(
                "deepsearch: corpus and questions go together; give both files or none"
            )
        self._corpus, self._questions = corpus, questions
        self._single_answer = single_answer
        self._show = (results or RESULTS[style], PAGE_CHARS[style])
        self._loaded: tuple[Index, Questions] | None = None
        if questions:
            self.version = f"{self.version} sha256:{load_questions(questions).digest[:16]}"

    @classmethod
    @validate_call
    def tasks(cls, *, questions: Path | None = None) -> Sequence[TaskSpec]:
        """Return one task for each of our 4,200 questions, or for each question of the file."""
        return [question.spec for question in load_questions(questions).by_id.values()]

    def load(self) -> None:
        """Build the index and the questions, once per process."""
        self._loaded = load(self._corpus, self._questions, self._style)

    def begin(self, task_id: str) -> tuple[str, Inquiry]:
        """Return the rules and the question."""
        index, questions = self._loaded or load(self._corpus, self._questions, self._style)
        question = self.find(questions.by_id, task_id)
        if self._style == "agentgym":
            return _AGENTGYM_PROMPT.format(question=question.text), AgentGymInquiry(
                question, index, *self._show, self._single_answer
            )
        rules = "Answer a question. No single page may hold what you need."
        again = ""
        if self._style == "full" and not self._single_answer:
            again = "You may answer again after a wrong answer.\n"
        text = self.introduce(rules, f"{again}Question: {question.text}")
        return text, Inquiry(question, index, *self._show, self._single_answer)

    def read(self, text: str) -> str | Unreadable:
        """Return the action that a reply names. In a plain reply it is the first tag."""
        tag = first_tag(text) if self._format == "plain" else None
        return super().read(f"<{tag[0]}>{' '.join(tag[1].split())}</{tag[0]}>" if tag else text)


def first_tag(text: str) -> tuple[str, str] | None:
    """Return the name and the content of the first closed `search` or `answer` tag.

    Each pattern passes over the text once: if the first opening tag is never closed, no later one of that name is.
    """
    pages = []
    for name, opening in _OPENED.items():
        if (opened := opening.search(text)) and (
            closed := _CLOSED[name].search(text, opened.end())
        ):
            pages.append((opened.start(), name, text[opened.end() : closed.start()]))
    return min(pages)[1:] if pages else None
