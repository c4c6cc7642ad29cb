"""A household in text, as ALFWorld has it: generated houses and goals."""
