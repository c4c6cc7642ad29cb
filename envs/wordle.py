"""Wordle: guess a five-letter word in six guesses. The reward is 1 for the word, else 0.

The 980 words (`wordle_words.txt`) are common ones, in an order that says nothing; any five letters are a guess.
"""

import re
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import ClassVar

from pydantic import validate_call

from horizonrl.envs.api import Step, TaskSpec
from horizonrl.envs.bounds import Chars
from horizonrl.envs.formats import ActionFormat, Command
from horizonrl.envs.game import GameEnvironment, Move, Style, split_tasks, unmoved, words

COMMANDS = (Command("guess", "guess {word}", "guess the word"),)
GUESSES = 6
TEST = 25
FIRST_GUESS = "slate"
"""It splits the 980 words into 122 kinds of answers. `trace` makes 129, but then one word takes seven guesses."""

_GUESS = re.compile(r"(?:guess[: ]\s*)?((?:[a-z][\s,]*){4}[a-z])[.!]?", re.IGNORECASE)
_RULES = """\
Guess a word of five letters in six guesses. The answer has a sign for each letter of the guess:
g: the letter is right, y: the letter stands elsewhere in the word, b: the word has no (more) such letter."""
_SHORT_RULES = "Guess a word of 5 letters in 6 guesses. g: right, y: elsewhere, b: not there."


class Guessing:
    """One word, until it is guessed or six guesses are spent."""

    def __init__(self, word: str) -> None:
        self._word = word
        self._left = GUESSES
        self._answers: dict[str, str] = {}
        """The signs of every guess so far."""

    def follow(self, action: str) -> Step:
        """Answer a guess by its signs."""
        if (found := _GUESS.fullmatch(action.strip())) is None:
            return unmoved("A guess has five letters: guess slate.")
        guess = "".join(filter(str.isalpha, found[1].lower()))
        signs = signs_of(guess, self._word)
        self._left -= 1
        self._answers[guess] = signs
        right = guess == self._word
        over = right or not self._left
        end = f"\nThe word was {self._word}." if over and not right else ""
        left = "" if over else f"\nGuesses left: {self._left}"
        observation = f"{' '.join(guess)}\n{' '.join(signs)}{left}{end}"
        return Step(observation, reward=float(right), terminated=over, success=right)

    def advise(self) -> Move:
        """Guess the fitting word whose answer will tell the most."""
        fitting = list_words()
        for guess, signs in self._answers.items():
            fitting = tuple(word for word in fitting if signs_of(guess, word) == signs)
        guess = best_guess(fitting) if self._answers else FIRST_GUESS
        count = len(fitting)
        return Move(f"guess {guess}", "It can only be this word." if count == 1 else f"{count} words fit.")


class Wordle(GameEnvironment[Guessing]):
    """One word at a time.

    format: how the agent names its action (envs/formats.py)
    style: `compact` explains the signs in one line
    max_observation_chars: bound of every observation
    """

    env_id: ClassVar[str] = "wordle"
    version: str = "1"
    commands: ClassVar[Sequence[Command]] = COMMANDS

    @validate_call
    def __init__(
        self, *, format: ActionFormat = "react", style: Style = "full", max_observation_chars: Chars = 2_048
    ) -> None:
        super().__init__(format, style, max_observation_chars)

    @classmethod
    def tasks(cls) -> Sequence[TaskSpec]:
        """Return a task for each of the 980 words."""
        return split_tasks(dict.fromkeys(_word_of(), "all"), TEST)

    def begin(self, task_id: str) -> tuple[str, Guessing]:
        """Return the rules."""
        if (word := _word_of().get(task_id)) is None:
            raise self.unknown(task_id)
        rules = _SHORT_RULES if self._style == "compact" else _RULES
        return f"{rules}\n{self.manual()}", Guessing(word)


@cache
def list_words() -> tuple[str, ...]:
    """Return the words in the order of the tasks."""
    return words(resources.files(__package__).joinpath("wordle_words.txt").read_text(encoding="utf-8"))


@cache
def _word_of() -> dict[str, str]:
    return {f"wordle-{number:03d}": word for number, word in enumerate(list_words())}


def signs_of(guess: str, word: str) -> str:
    """Return g, y or b for each letter of a guess; a letter is y as often as the word has it besides its g's."""
    left = [letter for letter, own in zip(word, guess, strict=True) if letter != own]
    signs = ""
    for letter, own in zip(word, guess, strict=True):
        if letter == own:
            signs += "g"
        elif own in left:
            left.remove(own)
            signs += "y"
        else:
            signs += "b"
    return signs


@cache
def best_guess(fitting: tuple[str, ...]) -> str:
    """Return the fitting word that splits them into the most kinds of answers; the first of equals."""
    return max(fitting, key=lambda guess: len({signs_of(guess, word) for word in fitting}))
