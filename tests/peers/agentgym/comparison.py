"""The counts of a comparison between AgentGym's servers and our environments."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class GameComparison:
    env: str
    episodes: int = 0
    turns: int = 0
    same_goal: int = 0
    same_first: int = 0
    """Episodes with the same first observation, in whatever order its parts are."""
    same_text: int = 0
    """Turns with exactly the same text."""
    same_words: int = 0
    """Turns with the same text, in whatever order its parts are."""
    same_score: int = 0
    same_end: int = 0
    solved: int = 0
    failures: int = 0
    turns_per_s: float = 0.0
    differences: list[str] = field(default_factory=list)
