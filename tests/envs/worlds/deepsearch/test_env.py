import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from horizonrl.common.errors import ConfigError
from horizonrl.envs import registry
from horizonrl.envs.api import Step
from horizonrl.envs.check import check
from horizonrl.envs.worlds.deepsearch.env import DeepSearch
from tests.envs.hash_seeds import printed_under_hash_seeds

PAGES = [
    {"title": "Kettle", "text": "The kettle was made by Ines Vald."},
    {"title": "Ines Vald", "text": "Ines Vald was born in Porto Rasa."},
]
ASKED = [
    {
        "id": "kettle",
        "question": "Where was the maker born?",
        "answers": ["Porto Rasa"],
        "split": "test",
    },
    {
        "id": "maker",
        "question": "Who made the kettle?",
        "answers": ["Ines Vald"],
        "searches": ["Kettle"],
    },
]
EPISODE = """
import asyncio, hashlib
from horizonrl.envs.worlds.deepsearch.env import DeepSearch

async def main():
    digest = hashlib.sha256()
    environment = DeepSearch(format="plain")
    for task in environment.tasks()[::97]:
        digest.update((await environment.reset(task.task_id)).text.encode())
        expert, step = environment.expert(), None
        while step is None or not step.terminated:
            step = await environment.step(expert.act(""))
            digest.update(step.observation.encode())
    print(digest.hexdigest())

asyncio.run(main())
"""


def play(replies: list[str], task_id: str = "maker", **options: Any) -> list[Step]:
    async def episode() -> list[Step]:
        environment = DeepSearch(**options)
        await environment.reset(task_id)
        return [await environment.step(reply) for reply in replies]

    return asyncio.run(episode())


@pytest.fixture
def own(tmp_path: Path) -> dict[str, Any]:
    """Options that name a corpus and questions of a user's own."""
    options = {}
    for name, lines in (("corpus", PAGES), ("questions", ASKED)):
        options[name] = tmp_path / f"{name}.jsonl"
        options[name].write_text("\n".join(map(json.dumps, lines)))
    return options


def test_the_expert_answers_every_test_question() -> None:
    tested = [task.task_id for task in registry.select("deepsearch", "test")]
    assert len(tested) == 400
    report = asyncio.run(check("deepsearch", {"style": "compact", "format": "plain"}, tested))
    assert report.passed, report


def test_episodes_do_not_depend_on_the_hash_seed() -> None:
    assert len(printed_under_hash_seeds(EPISODE)) == 1


def test_an_answer_ends_the_episode_and_in_retry_mode_only_the_right_one(
    own: dict[str, Any],
) -> None:
    wrong, right = "<answer>Porto</answer>", "<think>so</think>\n<answer> ines\nVALD. </answer>"
    assert [step.terminated for step in play([wrong], format="plain", **own)] == [True]
    steps = play([wrong, right], format="plain", single_answer=False, **own)
    assert [(step.reward, step.terminated, step.success) for step in steps] == [
        (0, False, False),
        (1, True, True),
    ]


def test_ones_own_pages_are_found_and_ones_own_questions_asked(own: dict[str, Any]) -> None:
    assert [(t.task_id, t.split) for t in registry.tasks("deepsearch", own)] == [
        ("kettle", "test"),
        ("maker", "train"),
    ]
    (found,) = play(["<search>made the kettle</search>"], format="plain", results=1, **own)
    assert found.observation == PAGES[0]["text"]
    assert registry.make("deepsearch", own).version.startswith("1 sha256:")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "Who?"}', "line 1: answers: Field required"),
        ("{", "line 1"),
        ("", "has no line"),
    ],
)
def test_a_broken_file_is_a_config_error_that_names_the_line(
    own: dict[str, Any], line: str, message: str
) -> None:
    own["questions"].write_text(line)
    with pytest.raises(ConfigError, match=message):
        DeepSearch(**own)


def test_a_corpus_without_questions_is_refused(own: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="go together"):
        DeepSearch(corpus=own["corpus"])


def test_the_compact_style_is_terse() -> None:
    async def first() -> str:
        return (await DeepSearch(style="compact", format="plain").reset("bamboogle-000")).text

    assert len(asyncio.run(first())) < 160
    (found,) = play(["<search>Tral</search>"], "bamboogle-000", style="compact", format="plain")
    assert len(found.observation) <= 200
