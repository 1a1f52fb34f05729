"""Container runtime hook (NRI plugin): observes every container and maintains podlist.json.

`nri` implements the protocol, `plugin` answers requests, `devices` finds the GPUs of a container, `podlist` writes the
file, and `loop` connects and reconnects.
"""
