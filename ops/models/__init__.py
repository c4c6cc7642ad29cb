"""Models to train here: directories, the pocket model, tiny random ones."""
