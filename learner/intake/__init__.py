"""From the group log to a batch: which group is admitted, dropped or a repeat, and what has been settled."""
