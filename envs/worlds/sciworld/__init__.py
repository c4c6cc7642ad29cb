"""SciWorld: ScienceWorld's simulator in JVMs of its own."""
