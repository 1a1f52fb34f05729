"""`podgpu withdraw` while the API server is too busy, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from podgpu.clock import Clock
from podgpu.errors import SourceError
from podgpu.kube.client import ApiClient
from podgpu.kube.config import ApiConfig
from podgpu.writers.withdraw import RETRY_SECONDS, Withdrawal, Withdrawn
from tests.kube.api_server import SimulatedApiServer
from tests.nodes.clock import FakeClock

OURS = {"app.kubernetes.io/managed-by": "podgpu"}
EVERYTHING = Withdrawn(nodes=1, events=1, rules=1)


@pytest.fixture
def server() -> Iterator[SimulatedApiServer]:
    """Has one object of each kind that exporters write."""
    with SimulatedApiServer() as running:
        conditions = [{"type": "GpuUnhealthy", "status": "True"}]
        running.put("nodes", {"metadata": {"name": "a"}, "status": {"conditions": conditions}})
        running.put("events", {"metadata": {"name": "e", "namespace": "team", "labels": OURS}})
        running.put("devicetaintrules", {"metadata": {"name": "r", "labels": OURS}})
        yield running


class Waits:
    """Advances a clock instead of waiting."""

    def __init__(self) -> None:
        fake = FakeClock()
        self._advance = fake.advance
        self.clock = Clock(fake.monotonic, fake.wall)
        self.seconds: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.seconds.append(seconds)
        self._advance(seconds)


@pytest.fixture
def waits() -> Waits:
    return Waits()


async def withdraw(server: SimulatedApiServer, waits: Waits) -> Withdrawn:
    async with ApiClient(ApiConfig(server.url, "the test")) as client:
        return await Withdrawal(client, waits.clock, waits.sleep).run()


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_each_request_is_repeated(
    status: int, server: SimulatedApiServer, waits: Waits
) -> None:
    server.failures = [(status, ""), None] * 6
    assert await withdraw(server, waits) == EVERYTHING
    assert server.failures == []
    assert server.objects("events") == server.objects("devicetaintrules") == []
    [node] = server.objects("nodes")
    assert node["status"]["conditions"] == []
    assert len(waits.seconds) == 6
    assert all(0.5 <= seconds <= 1 for seconds in waits.seconds), "each request begins anew"


async def test_backs_off(server: SimulatedApiServer, waits: Waits) -> None:
    server.failures = [(503, "")] * 6
    assert await withdraw(server, waits) == EVERYTHING
    longest = [1, 2, 4, 8, 16, 30]
    assert len(waits.seconds) == len(longest)
    for seconds, limit in zip(waits.seconds, longest, strict=True):
        assert limit / 2 <= seconds <= limit


async def test_waits_as_long_as_the_server_requests(
    server: SimulatedApiServer, waits: Waits
) -> None:
    server.failures = [(429, "7"), (429, "0")]
    assert await withdraw(server, waits) == EVERYTHING
    first, second = waits.seconds
    assert first == 7
    assert 1 <= second <= 2


async def test_gives_up(server: SimulatedApiServer, waits: Waits) -> None:
    server.refusal = (503, "etcd is down")
    with pytest.raises(SourceError, match="etcd is down"):
        await withdraw(server, waits)
    assert RETRY_SECONDS - 30 <= sum(waits.seconds) <= RETRY_SECONDS


async def test_does_not_wait_longer_than_it_repeats(
    server: SimulatedApiServer, waits: Waits
) -> None:
    server.failures = [(429, str(round(RETRY_SECONDS) + 1))]
    with pytest.raises(SourceError, match="429"):
        await withdraw(server, waits)
    assert waits.seconds == []


async def test_other_errors_are_final(server: SimulatedApiServer, waits: Waits) -> None:
    server.failures = [(403, "1")]
    with pytest.raises(SourceError, match="403"):
        await withdraw(server, waits)
    assert waits.seconds == []
