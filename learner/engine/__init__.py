"""A batch in, new weights out: the step and its objective, backends, ranks, checkpoints by parameter."""
