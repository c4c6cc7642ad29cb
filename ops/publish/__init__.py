"""What leaves a run: model and dataset cards, datasets, demonstrations, the hub."""
