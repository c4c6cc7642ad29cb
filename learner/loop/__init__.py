"""The learner's loop: take groups, step, commit, publish, and recover."""
