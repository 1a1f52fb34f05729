"""Predicts how long pods would wait for each other on one time-sliced GPU.

The model needs only the share of time for which each pod is busy alone. While a pod wants the GPU,
each other pod that wants it too gets one time slice for each slice of the pod:

    wait = busy × (sum of busy + wait of the others) × cost of a switch

It was measured on an H200 with mixes of up to five loads (docs/savings.md). It holds while the
busy shares add up to at most `MAX_BUSY`. Above that, queues build up.
"""

from __future__ import annotations

MAX_BUSY = 0.75
MAX_PODS = 5  # the largest mix that was measured
SWITCH_COST = 1.04  # a switch of 84 µs after each slice of 2.2 ms


def weigh(busy: float) -> float:
    """Returns the weight of a pod in a mix. It depends on its own busy share only.

    The equations of the model are linear. Their solution is the time for which a pod wants the GPU,
    busy or waiting: its weight × `stretch(sum of all weights)`.
    """
    return busy / (1 + SWITCH_COST * busy)


def stretch(weights: float) -> float:
    """`weights`: the sum of the weights of all pods."""
    return 1 / (1 - SWITCH_COST * weights)
