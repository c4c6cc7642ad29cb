"""Follow the learner's versions: the host's copy of the weights, and what an engine takes from it."""
