"""Tool use: weather, movies, papers, sheets and to-do lists over generated data."""
