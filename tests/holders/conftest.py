"""Fixtures: a simulated kubelet with a short socket path, and sources that read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from podgpu.node.holders.kubelet import KubeletAllocation
from tests.simulated_kubelet import FaultyKubelet


@pytest.fixture
def kubelet(folder: Path) -> Iterator[FaultyKubelet]:
    with FaultyKubelet(str(folder / "kubelet.sock")) as running:
        yield running


@pytest.fixture
def make_source() -> Callable[..., KubeletAllocation]:
    return lambda socket, **options: KubeletAllocation(str(socket), **options)


@pytest.fixture
def source(kubelet: FaultyKubelet) -> KubeletAllocation:
    return KubeletAllocation(kubelet.socket)
