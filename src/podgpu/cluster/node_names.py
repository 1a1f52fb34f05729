"""A node's name as the name of a metric, for `/metrics/nodes`. Pure.

Two nodes never share one, and a node's own never depends on which other nodes there are. Kubernetes' names are DNS
names: of those `-` becomes `_` and `.` becomes `:`. In any other name all but letters and digits become `::<hex>:`,
which no DNS name gives, as it has no empty part; one of letters and digits alone has a capital, which no DNS name has.
"""

from __future__ import annotations

import re

_DNS_PART = "[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_DNS_NAME = re.compile(rf"{_DNS_PART}(?:\.{_DNS_PART})*")
_NOT_PLAIN = re.compile(r"[^a-zA-Z0-9]")
_FOR_DNS = str.maketrans("-.", "_:")


def metric_name(node: str) -> str:
    """`gpu-1.lab` is `gpu_1:lab_info`."""
    if _DNS_NAME.fullmatch(node):
        name = node.translate(_FOR_DNS)
    else:
        name = _NOT_PLAIN.sub(lambda one: f"::{ord(one[0]):x}:", node)
    # No metric begins with a digit. No DNS name begins with "-", and no other name gives a "_": nothing else begins so.
    return f"_{name}_info" if name[:1].isdigit() else f"{name}_info"
