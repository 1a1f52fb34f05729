"""Fixtures: a healthy node with one pod, and a real server for its agent. Tests trigger the agent's
readings.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nodes.node import Description, Node, node_of
from tests.web.server import Client, running

UUID = "GPU-00000000-1111-2222-3333-444444444444"
POD = {"namespace": "research", "name": "train", "containers": {"main": {"nvidia.com/gpu": [UUID]}}}


@pytest.fixture
def node(folder: Path) -> Iterator[Node]:
    described = Description(
        about="two GPUs, one pod", gpus="2xH100", uuids=[UUID], pods=[POD], arguments=["-k"]
    )
    with node_of(described, folder) as built:
        yield built


@pytest.fixture
def client(node: Node) -> Iterator[Client]:
    with running(node.agent) as found:
        yield found
