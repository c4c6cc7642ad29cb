"""The pages and questions: those of the fictional world, or the user's own from two JSONL files.

A page is `{"title": ..., "text": ...}`. A question is `{"question": ..., "answers": [...]}`, optionally with `id`,
`category`, `split` and `searches`, which an expert looks up before it answers.
"""

from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from horizonrl.common.errors import ConfigError
from horizonrl.envs.api import Split, TaskSpec
from horizonrl.envs.game import Style
from horizonrl.envs.records import read_records
from horizonrl.envs.splits import is_validation
from horizonrl.envs.worlds.deepsearch.index import Index, Page
from horizonrl.envs.worlds.deepsearch.questions import Question, make_questions
from horizonrl.envs.worlds.deepsearch.world import RELATIONS, Entity, World, build_world

TEST_SHARE = 0.1
"""The expected share of test tasks among a user's questions without a split: those whose id has a low sha256."""

_BUILDING = Lock()


class PageLine(BaseModel):
    model_config = ConfigDict(extra="forbid")

    title: str
    text: str


class QuestionLine(BaseModel):
    model_config = ConfigDict(extra="forbid")

    question: Annotated[str, Field(min_length=1)]
    answers: Annotated[tuple[str, ...], Field(min_length=1)]
    id: str | None = None
    category: str = "all"
    split: Split | None = None
    searches: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Questions:
    by_id: dict[str, Question]
    digest: str
    """The digest of the user's file; empty for our own questions."""


@cache
def load_questions(path: Path | None = None) -> Questions:
    """Return our questions, or those of a file. Raises ConfigError with the file and the line if one is invalid."""
    if path is None:
        return Questions(
            {question.spec.task_id: question for question in make_questions(_world())}, ""
        )
    records, digest = read_records(path, QuestionLine, '{"question": "...", "answers": ["..."]}')
    by_id = {
        question.spec.task_id: question
        for question in (_question(*line) for line in enumerate(records.values()))
    }
    if len(by_id) < len(records):
        raise ConfigError(
            f"{path}: {len(records)} questions have {len(by_id)} different ids: give each its own"
        )
    return Questions(by_id, digest)


def load(corpus: Path | None, questions: Path | None, style: Style) -> tuple[Index, Questions]:
    """Return the index and the questions: ours, or those of files. The first call is slow: make it in a thread."""
    # Without the lock, threads that call at the same time would each build an index.
    with _BUILDING:
        return _index(corpus, style), load_questions(questions)


@cache
def _index(path: Path | None, style: Style) -> Index:
    if path is None:
        return Index([make_page(entity, style) for entity in _world().values()])
    records, _ = read_records(path, PageLine, '{"title": "...", "text": "..."}')
    return Index([Page(line.title, line.text) for line in records.values()])


@cache
def _world() -> World:
    return build_world()


def make_page(entity: Entity, style: Style) -> Page:
    """Return the facts about an entity as prose, or in the compact style as a list."""
    if style == "compact":
        facts = " ".join(f"{relation}: {value}." for relation, value in entity.facts.items())
        alias = f" ({entity.alias})" if entity.alias else ""
        return Page(entity.name, f"{entity.name}{alias}. {facts}", entity.alias)
    clauses = [f"{RELATIONS[relation].says} {value}" for relation, value in entity.facts.items()]
    alias = f", also known as {entity.alias}," if entity.alias else ""
    return Page(
        entity.name,
        f"{entity.name}{alias} {', '.join(clauses[:-1])} and {clauses[-1]}.",
        entity.alias,
    )


def _question(number: int, line: QuestionLine) -> Question:
    task_id = line.id or f"question-{number:05d}"
    spec = TaskSpec(task_id, line.split or _split(task_id), line.category)
    return Question(spec, line.question, line.answers, line.searches)


def _split(task_id: str) -> Split:
    if int.from_bytes(sha256(task_id.encode()).digest()[:4]) < TEST_SHARE * 2**32:
        return "test"
    return "validation" if is_validation(task_id) else "train"
