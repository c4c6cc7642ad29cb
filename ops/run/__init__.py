"""Runs on this machine: the processes of `train`, one role in a pod, models, the run directory."""
