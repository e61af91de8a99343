"""The live world: one machine, one process tree. `world.py` is its middle; each child process has a module here."""
