"""Container runtime hook (NRI plugin): observes every container and maintains podlist.json.

`nri` is the protocol and one connection, `plugin` answers requests, `devices` finds the GPUs of a container, `podlist`
writes the file, `loop` connects and reconnects.
"""
