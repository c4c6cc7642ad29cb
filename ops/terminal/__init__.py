"""What a terminal shows: texts, figures, and waiting."""
