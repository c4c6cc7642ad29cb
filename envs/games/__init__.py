"""Games of one file each: parity, a maze, Wordle."""
