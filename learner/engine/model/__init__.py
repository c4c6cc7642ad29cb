"""The model as the learner runs it: packing, attention, the scoring head, LoRA."""
