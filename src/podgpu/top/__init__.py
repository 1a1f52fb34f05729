"""This room is `podgpu top`: figures of a snapshot or of an exporter's exposition, as lines of a table, in a terminal.

Figures, lines, cells and controls are pure. `terminal.py`, `feed.py`, `local.py` and `exporter.py` touch the world.
"""
