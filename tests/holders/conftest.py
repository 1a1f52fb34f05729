"""A simulated kubelet on a short path, and sources that are closed after the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from podgpu.holders.kubelet import KubeletAllocation
from tests.simulated_kubelet import FaultyKubelet


@pytest.fixture
def kubelet(folder: Path) -> Iterator[FaultyKubelet]:
    with FaultyKubelet(str(folder / "kubelet.sock")) as running:
        yield running


@pytest.fixture
def make_source() -> Iterator[Callable[..., KubeletAllocation]]:
    made: list[KubeletAllocation] = []

    def make(socket: str | Path, **options: object) -> KubeletAllocation:
        made.append(KubeletAllocation(str(socket), **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for source in made:
        source.close()


@pytest.fixture
def source(kubelet: FaultyKubelet, make_source: Callable[..., KubeletAllocation]) -> KubeletAllocation:
    return make_source(kubelet.socket)
