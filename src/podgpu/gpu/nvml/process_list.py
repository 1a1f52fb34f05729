"""ProcessList reads who is on one GPU: compute processes, MPS clients and graphics, each process once per device.

Knows pids and bytes. Whose processes they are is accounting's to find out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from podgpu.errors import Unsupported
from podgpu.gpu.nvml.attempts import again_while_it_grows
from podgpu.gpu.nvml.driver import NvmlDriver
from podgpu.gpu.nvml.mig import Instance, instance_named
from podgpu.model import ProcessUsage, device_key

# With their version: without one, pynvml meets a driver that lacks the newest with an exception that is no NVMLError.
_LISTS = tuple(
    tuple(f"nvmlDeviceGet{kind}RunningProcesses_{version}" for version in ("v3", "v2"))
    for kind in ("Compute", "MPSCompute", "Graphics")
)
_NOT_AVAILABLE = 0xFFFFFFFFFFFFFFFF
MOST_PID = 1 << 22  # PID_MAX_LIMIT: what is above is no pid but memory the driver left as it was


class _Target(NamedTuple):
    """What NVML can be asked: the GPU, or one MIG device on it."""

    handle: Any
    uuid: str
    key: str
    """Of the device whose processes it lists, unless an entry names a GPU instance itself."""


class ProcessList:
    """Reading after reading. Shares no state with other readers of the same GPU, so it may have its own worker."""

    def __init__(self, driver: NvmlDriver, handle: Any, uuid: str) -> None:
        self._driver = driver
        self._gpu = _Target(handle, uuid, uuid)
        self._in_mig = False
        self._struck: dict[str, dict[str, str]] = {}
        """UUID of the GPU or MIG device -> functions it cannot answer, and the reason word for it."""

    def read(self, in_mig: bool, instances: Sequence[Instance]) -> tuple[ProcessUsage, ...]:
        """Raises Unsupported where no list can be had at all, SourceError when one fails this time."""
        if in_mig != self._in_mig:
            self._in_mig, self._struck = in_mig, {}
        parts = self._mig_devices(instances)
        if in_mig and not parts:
            return ()  # cut into nothing: there is nowhere to run
        self._forget_strikes([self._gpu, *parts])
        answers = [answer for versions in _LISTS for answer in self._answers(versions, parts)]
        if all(answer is None for answer in answers):
            reason = next(iter(self._struck[self._gpu.uuid].values()))
            raise Unsupported(f"NVML lists no processes on {self._gpu.uuid}", reason)
        return _each_once(usage for answer in answers for usage in answer or ())

    def _mig_devices(self, instances: Iterable[Instance]) -> list[_Target]:
        """All of them: a GPU instance has a MIG device for each of its compute instances."""
        return [
            _Target(
                self._driver.call("nvmlDeviceGetHandleByUUID", uuid), uuid, device_key(self._gpu.uuid, instance.gi_id)
            )
            for instance in instances
            for uuid in instance.mig_uuids
        ]

    def _forget_strikes(self, present: Iterable[_Target]) -> None:
        """What was destroyed while it was asked seemed to support nothing; made anew, it may have the same UUID."""
        self._struck = {target.uuid: self._struck.get(target.uuid, {}) for target in present}

    def _answers(self, versions: Sequence[str], parts: Sequence[_Target]) -> Iterator[list[ProcessUsage] | None]:
        """None for each that has no such list. In MIG mode the GPU speaks for its parts only to the privileged."""
        whole = self._ask(self._gpu, versions)
        yield whole
        if not whole:
            yield from (self._ask(part, versions) for part in parts)

    def _ask(self, target: _Target, versions: Sequence[str]) -> list[ProcessUsage] | None:
        struck = self._struck[target.uuid]
        for function in versions:
            if function in struck:
                continue
            try:
                entries = again_while_it_grows(partial(self._driver.call, function, target.handle))
            except Unsupported as e:
                struck[function] = e.reason
                continue
            mps = "MPS" in function
            return [self._usage(target, entry, mps) for entry in entries if 0 < entry.pid <= MOST_PID]
        return None

    def _usage(self, target: _Target, entry: Any, mps: bool) -> ProcessUsage:
        gi_id = instance_named(entry.gpuInstanceId)
        memory = None if entry.usedGpuMemory == _NOT_AVAILABLE else entry.usedGpuMemory
        key = target.key if gi_id is None else device_key(self._gpu.uuid, gi_id)
        return ProcessUsage(key, entry.pid, memory, mps)


def _each_once(usages: Iterable[ProcessUsage]) -> tuple[ProcessUsage, ...]:
    """A process that computes and draws is in two lists, in each with all its memory."""
    found: dict[tuple[str, int], ProcessUsage] = {}
    for usage in usages:
        place = (usage.device, usage.pid)
        known = found.get(place)
        if known is None or _bytes(usage) > _bytes(known):
            found[place] = usage
    return tuple(found[place] for place in sorted(found))


def _bytes(usage: ProcessUsage) -> int:
    return -1 if usage.memory is None else usage.memory
