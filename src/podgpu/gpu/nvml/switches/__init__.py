"""This room reads the driver's context-switch log: how busy time on a shared GPU is divided when samples cannot tell
whose it is.

`division.py` decides and divides. `opening.py` finds out whether the log may be read, `resource_manager.py` reads it
and `listener.py` keeps it empty. `records.py` and `attribution.py` are pure: what the bytes say, and what follows.
"""
