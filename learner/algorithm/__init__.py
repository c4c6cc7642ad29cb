"""The mathematics as pure functions of arrays: advantages, losses, corrections."""
