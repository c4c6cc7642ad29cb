"""The tasks and their grader, apart from the agent: neither needs smolagents, which takes a second to import."""

from typing import Any

WORDS = {"plus": int.__add__, "minus": int.__sub__, "times": int.__mul__}


def sums() -> list[dict[str, Any]]:
    """Return 300 questions: a fifth for validation, a fifth for test."""
    splits = ("test", "train", "train", "train", "validation")
    return [
        {
            "id": f"{first}-{word}-{second}",
            "split": splits[(first + second) % len(splits)],
            "category": word,
            "question": f"What is {first} {word} {second}?",
            "answer": function(first, second),
        }
        for first in range(2, 12)
        for second in range(2, 12)
        for word, function in WORDS.items()
    ]


def grade(task: dict[str, Any], answer: Any) -> float:
    """Return the reward of what `solve` returned; None if the program was cut off before."""
    return float(str(answer).strip() == str(task["answer"]))
