"""The commands by group: each module declares the parsers of its commands and runs them.

What a command imports is imported when it runs, so that `--help` answers at once.
"""
