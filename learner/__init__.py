"""The learner: fills a batch from the group log, takes a step, commits it, announces the version."""
