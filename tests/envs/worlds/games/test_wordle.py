import asyncio
import time
from collections import Counter
from pathlib import Path

import pytest

from horizonrl.common.errors import ConfigError
from horizonrl.envs import registry
from horizonrl.envs.api import Step
from horizonrl.envs.worlds.games.wordle import (
    AgentGymGuessing,
    Guessing,
    Wordle,
    best_guess,
    list_words,
    mark_guess,
)


@pytest.mark.parametrize(
    ("guess", "word", "signs"),
    [
        ("crane", "crane", "ggggg"),
        ("crane", "stoic", "ybbbb"),
        ("geese", "these", "bbggg"),  # The first e is spent: both of the word's stand right.
        ("eerie", "three", "ybgbg"),
        ("allow", "local", "yyyyb"),
        ("llama", "local", "gyybb"),
    ],
)
def test_a_letter_is_elsewhere_as_often_as_the_word_has_it_there(
    guess: str, word: str, signs: str
) -> None:
    assert mark_guess(guess, word) == signs


def test_the_words_are_980_of_five_letters_and_25_of_them_are_for_tests() -> None:
    assert len(set(list_words())) == 980
    assert all(len(word) == 5 and word.isascii() and word.islower() for word in list_words())
    assert len(registry.select("wordle", "train")) == 835
    assert len(registry.select("wordle", "test")) == 25


def test_the_expert_guesses_every_word_in_time() -> None:
    turns = Counter[int]()
    for word in list_words():
        game, step, taken = Guessing(word, list_words()), None, 0
        while step is None or not step.terminated:
            step, taken = game.follow(game.advise().action), taken + 1
        assert step.success, word
        turns[taken] += 1
    assert max(turns) <= 6
    assert sum(turn * count for turn, count in turns.items()) / 980 < 3.3


@pytest.mark.parametrize(
    "guess", ["guess slate", "SLATE", "s l a t e", "guess: s,l,a,t,e", "slate."]
)
def test_a_guess_may_be_spelled(guess: str) -> None:
    assert (
        Guessing("stale", list_words()).follow(guess).observation
        == "s l a t e\ng y g y g\nGuesses left: 5"
    )


@pytest.mark.parametrize("text", ["", "slat", "slates", "guess 12345", "sl\u00e4te"])
def test_what_is_no_guess_costs_none(text: str) -> None:
    game = Guessing("stale", list_words())
    assert game.follow(text) == Step(
        "A guess has five letters: guess slate.", reward=0.0, terminated=False
    )
    assert game.follow("other").observation.endswith("Guesses left: 5")


def test_the_sixth_wrong_guess_ends_it_and_tells_the_word() -> None:
    game = Guessing("stale", list_words())
    steps = [game.follow("other") for _ in range(6)]
    assert [step.terminated for step in steps] == [False] * 5 + [True]
    assert steps[-1].observation.endswith("The word was stale.")
    assert not any(step.reward or step.success for step in steps)


def drawn_anew(words: tuple[str, ...], *guesses: str, seed: int = 3) -> list[Step]:
    """Play by LMRL-Gym's rules; `tests/peers/agentgym games` compares both turn by turn."""
    game = AgentGymGuessing(seed, words)
    return [game.follow(guess) for guess in guesses]


def test_by_lmrl_gyms_rules_the_word_is_drawn_anew_among_those_that_fit() -> None:
    words = ("shire", "share", "score", "snore", "panic")
    answers = {drawn_anew(words, "s h i r e", seed=seed)[0].observation for seed in range(40)}
    assert answers == {"g g g g g\n", "g g b g g\n", "g b b g g\n", "b b y b b\n"}
    for seed in range(40):
        first, second = drawn_anew(words, "p a n i c", "s h a r e", seed=seed)
        assert first.success or "y" in first.observation or "b b b b b" in first.observation
        assert second.success is (second.observation == "g g g g g\n")


def test_by_lmrl_gyms_rules_what_is_none_of_the_words_costs_a_guess() -> None:
    steps = drawn_anew(("shire", "panic"), "shir", "other", "SHIRE", "q q q q q", "", "s h i r e s")
    assert {step.observation for step in steps} == {"invalid word"}
    assert [step.terminated for step in steps] == [False] * 5 + [True]
    assert not any(step.reward for step in steps)


def test_a_word_that_a_file_has_twice_can_be_guessed_in_agentgyms_style(tmp_path: Path) -> None:
    file = tmp_path / "words.txt"
    file.write_text("crane\nslate\nCrane\nabout\ncrane\n")
    assert list_words(file) == ("crane", "slate", "about")

    async def play(task_id: str) -> bool:
        environment = Wordle(words=file, style="agentgym", format="plain")
        await environment.reset(task_id)
        expert, step = environment.expert(), None
        while step is None or not step.terminated:
            step = await environment.step(expert.act(""))
        return step.success

    assert all(asyncio.run(play(f"wordle-{number:03d}")) for number in range(20))


def test_the_expert_compares_a_part_of_a_long_list_of_words() -> None:
    letters = "aeiostrnldbc"
    words = tuple(
        f"{a}{b}{c}{d}y" for a in letters for b in letters for c in letters for d in letters
    )
    began = time.process_time()
    assert best_guess(words) in words
    assert time.process_time() - began < 3


@pytest.fixture
def own_words(tmp_path: Path) -> Path:
    file = tmp_path / "words.txt"
    letters = "aeiostrnld"
    file.write_text(
        "to\nSHIRE\nshire\n"
        + "\n".join(f"{a}{b}{c}xy" for a in letters for b in letters for c in letters)
    )
    return file


def test_words_can_be_a_users_own(own_words: Path) -> None:
    tasks = registry.tasks("wordle", {"words": str(own_words)})
    assert len({task.task_id for task in tasks}) == len(tasks) == 1001
    assert 200 < sum(task.split == "test" for task in tasks) < 300
    assert Wordle(words=own_words).version != Wordle().version

    async def guessed(task_id: str, word: str) -> bool:
        environment = Wordle(words=own_words, format="plain")
        await environment.reset(task_id)
        return (await environment.step(word)).success

    assert asyncio.run(guessed("wordle-shire", "Shire"))
    assert asyncio.run(guessed("wordle-dddxy", "dddxy"))
    with pytest.raises(ConfigError, match="no task 'wordle-007'"):
        asyncio.run(guessed("wordle-007", "shire"))


def test_a_users_word_stays_in_its_split_when_the_file_grows(
    tmp_path: Path, own_words: Path
) -> None:
    before = set(registry.tasks("wordle", {"words": str(own_words)}))
    longer = tmp_path / "longer.txt"
    longer.write_text("panic\n" + own_words.read_text())
    assert before < set(registry.tasks("wordle", {"words": str(longer)}))


def test_in_agentgyms_style_the_tasks_are_seeds_whatever_the_words(own_words: Path) -> None:
    options = {"words": str(own_words), "style": "agentgym"}
    assert registry.tasks("wordle", options) == registry.tasks("wordle")
    observation = asyncio.run(registry.make("wordle", options).reset("wordle-979"))
    assert observation.text == "Let's start Wordle!"


def test_a_file_without_words_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no words at"):
        Wordle(words=tmp_path / "none.txt")
    (file := tmp_path / "short.txt").write_text("to")
    with pytest.raises(ConfigError, match="has no word of five letters"):
        Wordle(words=file)
    (file := tmp_path / "umlaut.txt").write_text("shire\nfrüh!\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="'früh!'"):
        registry.tasks("wordle", {"words": str(file)})
