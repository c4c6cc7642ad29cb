"""Start and join the learner's processes, on one machine or several."""
