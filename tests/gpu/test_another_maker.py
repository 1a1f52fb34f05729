"""Another maker's GPUs are one class that keeps the telemetry protocol: nothing above it has to know whose they are."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from podgpu.agent.loop import Agent, Settings
from podgpu.clock import Clock
from podgpu.gpu.source import ErrorEvent, GpuAnswer, Inventory, Telemetry, UsageFlaws
from podgpu.metrics.counters import shipped_counters
from podgpu.metrics.fields import Field, field_named
from podgpu.metrics.parse import parse_text
from podgpu.metrics.render import Policy
from podgpu.model import Device, DeviceUsage, ProcessUsage, Reading

CARD = Device(0, "9f4a-01", "0000:03:00.0", "Accelerator 300", maker="card")
POWER = "DCGM_FI_DEV_POWER_USAGE"


class Accelerators:
    """A node with one of them, which draws 250 W and has told of one error."""

    name = "accelerators"
    expected: int | None = 1

    def __init__(self) -> None:
        self._events = [ErrorEvent(CARD.key, 7, 1_700_000_000.0)]

    def inventory(self) -> Inventory:
        return Inventory((CARD,))

    def read(self, gpu: Device, fields: Sequence[Field]) -> GpuAnswer:
        power = field_named(POWER)
        assert power is not None
        told = {power.id} & {field.id for field in fields}
        missing = tuple((gpu.key, field.id) for field in fields if field.id not in told)
        return GpuAnswer((Reading(gpu, dict.fromkeys(told, 250.0)),), missing)

    def processes(self, gpu: Device) -> Sequence[ProcessUsage]:
        return ()

    def usage(self, gpu: Device, shared: Collection[str] = ()) -> tuple[DeviceUsage, ...]:
        return (DeviceUsage(gpu, 0),)

    def usage_flaws(self, gpu: Device) -> UsageFlaws:
        return UsageFlaws()

    def error_events(self) -> Sequence[ErrorEvent]:
        events, self._events = self._events, []
        return events

    def release(self, wait: float) -> bool:
        return True


def test_another_makers_gpus_are_told_by_their_own_names() -> None:
    telemetry: Telemetry = Accelerators()
    policy = Policy(counters=shipped_counters("default") or (), hostname="node-a")
    agent = Agent(telemetry, (), Settings(policy=policy), Clock(lambda: 100.0, lambda: 1_700_000_100.0))
    agent.read_telemetry()
    agent.read_telemetry()
    exposition = agent.published.fresh.plain.decode()
    agent.stop()
    families = {family.name: family.samples for family in parse_text(exposition)}
    (power,) = families[POWER]
    assert (power.value, power.labels["device"], power.labels["modelName"]) == (250.0, "card0", "Accelerator 300")
    (errors,) = families["podgpu_xid_errors_total"]
    assert (errors.value, errors.labels["xid"], errors.labels["device"]) == (1.0, "7", "card0"), (
        "told once, counted once"
    )


def test_a_name_is_the_makers_word_and_the_index() -> None:
    assert Device(3, "GPU-3", "", "NVIDIA H200").name == "nvidia3"
    assert replace(CARD, index=2).name == "card2"
