"""The command line and the commands that have no room of their own."""
