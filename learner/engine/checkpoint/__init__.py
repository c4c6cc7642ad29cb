"""The model's state by parameter name, and the weights files made of it."""
