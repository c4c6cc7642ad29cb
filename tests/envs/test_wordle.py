import asyncio
from collections import Counter

import pytest

from horizonrl.envs import registry
from horizonrl.envs.api import Step
from horizonrl.envs.check import check
from horizonrl.envs.wordle import Guessing, list_words, signs_of


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
def test_a_letter_is_elsewhere_as_often_as_the_word_has_it_there(guess: str, word: str, signs: str) -> None:
    assert signs_of(guess, word) == signs


def test_the_words_are_980_of_five_letters_and_25_of_them_are_for_tests() -> None:
    assert len(set(list_words())) == 980
    assert all(len(word) == 5 and word.isascii() and word.islower() for word in list_words())
    assert len(registry.select("wordle", "train")) == 955
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


@pytest.mark.parametrize("guess", ["guess slate", "SLATE", "s l a t e", "guess: s,l,a,t,e", "slate."])
def test_a_guess_may_be_spelled(guess: str) -> None:
    assert Guessing("stale", list_words()).follow(guess).observation == "s l a t e\ng y g y g\nGuesses left: 5"


@pytest.mark.parametrize("text", ["", "slat", "slates", "guess 12345", "sl\u00e4te"])
def test_what_is_no_guess_costs_none(text: str) -> None:
    game = Guessing("stale", list_words())
    assert game.follow(text) == Step("A guess has five letters: guess slate.", reward=0.0, terminated=False)
    assert game.follow("other").observation.endswith("Guesses left: 5")


def test_the_sixth_wrong_guess_ends_it_and_tells_the_word() -> None:
    game = Guessing("stale", list_words())
    steps = [game.follow("other") for _ in range(6)]
    assert [step.terminated for step in steps] == [False] * 5 + [True]
    assert steps[-1].observation.endswith("The word was stale.")
    assert not any(step.reward or step.success for step in steps)


@pytest.mark.parametrize("action_format", ["react", "plain", "function", "code"])
def test_the_expert_guesses_in_every_format(action_format: str) -> None:
    assert asyncio.run(check("wordle", {"format": action_format, "style": "compact"}, ["wordle-007"])).passed
