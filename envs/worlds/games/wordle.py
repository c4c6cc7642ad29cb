"""Wordle: guess a five-letter word in six guesses. The reward is 1 for the word, else 0.

The 980 words (`wordle_words.txt`) are common words in random order, and any five letters are a valid guess. In
AgentGym's style the rules are LMRL-Gym's: a guess must be one of the words, and each guess draws a new hidden word from
those that fit the answers so far.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from importlib import resources
from pathlib import Path
from random import Random

from pydantic import validate_call

from horizonrl.common.errors import ConfigError
from horizonrl.envs.api import Step, TaskSpec
from horizonrl.envs.formats import ActionFormat, Command
from horizonrl.envs.game import GameEnvironment, Move, Style, refuse_move, words
from horizonrl.envs.splits import hashed_split, lowest_hashes, split_tasks
from horizonrl.envs.text_limits import Chars

COMMANDS = (Command("guess", "guess {word}", "guess the word"),)
GUESSES = 6
TEST = 25
FIRST_GUESS = "slate"
"""Splits the 980 words into 122 groups by their answer. `trace` makes 129 groups, but then one word takes 7 guesses."""

_GUESS = re.compile(r"(?:guess[: ]\s*)?((?:[a-z][\s,]*){4}[a-z])[.!]?", re.IGNORECASE)
_RULES = """\
Guess a word of five letters in six guesses. The answer has a sign for each letter of the guess:
g: the letter is right, y: the letter stands elsewhere in the word, b: the word has no (more) such letter."""
_SHORT_RULES = "Guess a word of 5 letters in 6 guesses. g: right, y: elsewhere, b: not there."


@dataclass
class Guessing:
    """One word, until it is guessed or six guesses are spent."""

    word: str
    words: tuple[str, ...]
    guesses_left: int = GUESSES
    answers: dict[str, str] = field(default_factory=dict)
    """The signs of every guess so far."""

    def follow(self, action: str) -> Step:
        """Answer a guess with its signs."""
        if (match := _GUESS.fullmatch(action.strip())) is None:
            return refuse_move("A guess has five letters: guess slate.")
        guess = "".join(filter(str.isalpha, match[1].lower()))
        signs = mark_guess(guess, self.word)
        self.guesses_left -= 1
        self.answers[guess] = signs
        right = guess == self.word
        over = right or not self.guesses_left
        end = f"\nThe word was {self.word}." if over and not right else ""
        count = "" if over else f"\nGuesses left: {self.guesses_left}"
        observation = f"{' '.join(guess)}\n{' '.join(signs)}{count}{end}"
        return Step(observation, reward=float(right), terminated=over, success=right)

    def advise(self) -> Move:
        """Guess the fitting word whose answer tells the most."""
        fitting = self._fitting()
        guess = (
            FIRST_GUESS if fitting == self.words and FIRST_GUESS in fitting else best_guess(fitting)
        )
        count = len(fitting)
        return Move(
            self._spell(guess), "It can only be this word." if count == 1 else f"{count} words fit."
        )

    def _fitting(self) -> tuple[str, ...]:
        # All words again: the answers decide, so the expert can take over in the middle of an episode.
        fitting = self.words
        for guess, signs in self.answers.items():
            fitting = tuple(word for word in fitting if mark_guess(guess, word) == signs)
        return fitting

    def _spell(self, guess: str) -> str:
        return f"guess {guess}"


class Clues:
    """LMRL-Gym's record of the answers: whether each letter is in each position, cannot be there, or may be."""

    def __init__(self) -> None:
        self._letters: dict[str, list[bool | None]] = {}

    def learn(self, guess: str, word: str) -> None:
        """Note the answer to a guess."""
        for index, letter in enumerate(guess):
            if letter in word:
                self._letters.setdefault(letter, [None] * len(word))[index] = letter == word[index]
            else:
                self._letters[letter] = [False] * len(word)

    def fits(self, word: str) -> bool:
        """Return whether a word can still be the hidden one."""
        return all(
            (letter in word) is (not self._absent(letter))
            and all(
                clue is None or clue is (word[index] == letter) for index, clue in enumerate(places)
            )
            for letter, places in self._letters.items()
        )

    def signs(self, guess: str) -> str:
        """Return g, y or b for each letter of a guess that was answered."""
        return "".join(
            "g" if self._letters[letter][index] else "b" if self._absent(letter) else "y"
            for index, letter in enumerate(guess)
        )

    def _absent(self, letter: str) -> bool:
        return all(clue is False for clue in self._letters[letter])


class AgentGymGuessing(Guessing):
    """A word that is drawn again at each guess, by LMRL-Gym's rules and in AgentGym's words."""

    def __init__(self, seed: int, words: tuple[str, ...]) -> None:
        super().__init__("", words)
        self._random = Random(seed)
        self._clues = Clues()

    def follow(self, action: str) -> Step:
        """Answer a guess with its signs. A guess that is not in the word list costs a guess too."""
        guess = action.strip().replace(" ", "")
        self.guesses_left -= 1
        if guess not in self.words:
            return Step("invalid word", reward=0.0, terminated=not self.guesses_left)
        self._clues.learn(guess, self._random.choice(self._fitting()))
        right = self._fitting() == (guess,)
        signs = " ".join(self._clues.signs(guess))
        return Step(
            f"{signs}\n",
            reward=float(right),
            terminated=right or not self.guesses_left,
            success=right,
        )

    def _fitting(self) -> tuple[str, ...]:
        return tuple(word for word in self.words if self._clues.fits(word))

    def _spell(self, guess: str) -> str:
        return " ".join(guess)


class Wordle(GameEnvironment[Guessing]):
    """One word at a time.

    words: a file of five-letter words instead of ours, each a task; AgentGym uses LMRL-Gym's `tweet_words.txt`
    format: how the agent names its action (envs/formats.py)
    style: `compact` explains the signs in one line
    max_observation_chars: bound of every observation
    """

    env_id = "wordle"
    version = "1"
    commands = COMMANDS

    @validate_call
    def __init__(
        self,
        *,
        words: Path | None = None,
        format: ActionFormat = "react",
        style: Style = "full",
        max_observation_chars: Chars = 2_048,
    ) -> None:
        super().__init__(format, style, max_observation_chars)
        self._file, self._words = words, list_words(words)
        if words is not None:
            self.version = (
                f"{self.version} sha256:{sha256(' '.join(self._words).encode()).hexdigest()[:16]}"
            )

    @classmethod
    @validate_call
    def tasks(cls, *, words: Path | None = None, style: Style = "full") -> Sequence[TaskSpec]:
        """Return one task for each word, or for each of AgentGym's 980 seeds, which draw from all the words."""
        if words is None or style == "agentgym":
            names = _tasks_by_word()
            return split_tasks(dict.fromkeys(names, "all"), lowest_hashes(names, TEST))
        return tuple(
            TaskSpec(task_id, hashed_split(task_id), "all") for task_id in _words_by_task(words)
        )

    def begin(self, task_id: str) -> tuple[str, Guessing]:
        """Return the rules."""
        if self._style == "agentgym":
            number = self.find(_tasks_by_word(), task_id)
            return "Let's start Wordle!", AgentGymGuessing(number, self._words)
        word = self.find(_words_by_task(self._file), task_id)
        return self.introduce(_RULES, "", _SHORT_RULES), Guessing(word, self._words)


@cache
def list_words(path: Path | None = None) -> tuple[str, ...]:
    """Return our words in the order of the tasks, or those of a file. Raises ConfigError for a file without words."""
    if path is None:
        return words(
            resources.files(__package__).joinpath("wordle_words.txt").read_text(encoding="utf-8")
        )
    try:
        written = path.read_text(encoding="utf-8").lower().split()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"wordle: no words at {path} ({error}): give a text file with a word a line"
        ) from None
    candidates = tuple(dict.fromkeys(word for word in written if len(word) == 5))
    if not candidates:
        raise ConfigError(
            f"wordle: {path} has no word of five letters: give a text file with a word a line"
        )
    if (
        odd := next((word for word in candidates if not (word.isascii() and word.isalpha())), None)
    ) is not None:
        raise ConfigError(
            f"wordle: {path} has {odd!r}, which nobody can guess: a word has the letters a to z"
        )
    return candidates


@cache
def _words_by_task(path: Path | None) -> dict[str, str]:
    if path is None:
        return dict(zip(_tasks_by_word(), list_words(), strict=True))
    return {f"wordle-{word}": word for word in list_words(path)}


@cache
def _tasks_by_word() -> dict[str, int]:
    return {f"wordle-{number:03d}": number for number in range(len(list_words()))}


def mark_guess(guess: str, word: str) -> str:
    """Return g, y or b for each letter of a guess. A letter gets y as often as the word has it outside of its g's."""
    unmatched = [letter for letter, actual in zip(word, guess, strict=True) if letter != actual]
    signs = ""
    for letter, actual in zip(word, guess, strict=True):
        if letter == actual:
            signs += "g"
        elif actual in unmatched:
            unmatched.remove(actual)
            signs += "y"
        else:
            signs += "b"
    return signs


@cache
def best_guess(fitting: tuple[str, ...]) -> str:
    """Return the fitting word that splits the fitting words into the most groups by answer; ties go to the first.

    Of many words only some are compared, evenly spread: all of a long list would take minutes.
    """
    guesses, compared = _spread(fitting, 200), _spread(fitting, 1_000)
    return max(guesses, key=lambda guess: len({mark_guess(guess, word) for word in compared}))


def _spread(words: tuple[str, ...], most: int) -> tuple[str, ...]:
    return words[:: -(-len(words) // most)]
