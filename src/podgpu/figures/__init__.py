"""This room has what people look at, in one shape for all: `top`, the web page, the cluster view. Pure.

`device.py` has the figures of a device and its holders; `from_exposition.py` and `from_state.py` make them.
`picture.py` is a whole picture of one node or many, which `as_json.py` writes for the web page and `from_json.py` reads
for `top`.
"""
