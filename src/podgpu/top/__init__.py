"""What `podgpu top` shows: figures from a snapshot or from an exporter's page, as lines of a table, in a terminal.

Figures, lines, cells, keys and controls are pure. `terminal.py`, `feed.py`, `local.py` and `page.py` touch the world.
"""
