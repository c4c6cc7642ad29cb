"""A batch in, new weights out: the policy-gradient step, its backends, ranks, checkpoints by parameter."""
