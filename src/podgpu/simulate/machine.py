"""This module is the simulated machine below the driver: its GPUs, the addresses handles stand for, and everything that
may change.

Knows no NVML function. One lock guards all of it; it is taken for short moments only and never while a call hangs.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from podgpu.errors import UsageError
from podgpu.simulate.gpu import MigInstance, SimulatedGpu, lay_out
from podgpu.simulate.models import MigProfile
from podgpu.simulate.spec import MAX_GPUS, GpuSpec, parse_profiles, parse_spec
from podgpu.simulate.workload import SimulatedLoad

_T = TypeVar("_T")
_FIRST_ADDRESS = 0x7F00_0000_1000
_ADDRESS_STEP = 0x40


@dataclass(frozen=True, slots=True)
class Handle:
    """A device handle: a number that nothing ever dereferences.

    Where pynvml puts a handle inside a ctypes struct (an event's device, the two samples of a GPM request) a pointer
    of pynvml's own type carries the number instead; both forms are understood everywhere.
    """

    address: int

    @property
    def _as_parameter_(self) -> ctypes.c_void_p:
        """ctypes takes it for the pointer it stands for."""
        return ctypes.c_void_p(self.address)


def pointer_to(address: int, pointer_type: Any) -> Any:
    return ctypes.cast(ctypes.c_void_p(address), pointer_type)


def address_in(handle: Any) -> int:
    """The number a handle or pointer carries; 0, which is nobody's, for anything else."""
    if isinstance(handle, Handle):
        return handle.address
    try:
        return ctypes.cast(handle, ctypes.c_void_p).value or 0
    except ctypes.ArgumentError:
        return 0


@dataclass(frozen=True, slots=True)
class Target:
    """What a device handle stands for: a GPU, or one MIG device of it."""

    gpu: SimulatedGpu
    instance: MigInstance | None = None


class Machine:
    def __init__(
        self,
        specs: Sequence[GpuSpec],
        *,
        seed: int,
        clock: Callable[[], float],
        wall: Callable[[], float],
        uuids: Sequence[str],
        mig_uuids: Mapping[tuple[int, int], str],
        minors: Sequence[int],
        unrest: float,
        node: str = "",
    ) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        """Told of whatever a waiting call may wait for."""
        self.clock = clock
        self.seed = seed
        self.unrest = unrest
        self.node = node
        # Fixed once: two clocks read at two moments would make the same sample's timestamp differ between reads.
        self.epoch = wall() - clock()
        self.gpus: list[SimulatedGpu] = []
        self.targets: dict[int, Target] = {}
        self._addresses = itertools.count(_FIRST_ADDRESS, _ADDRESS_STEP)
        self._numbers = itertools.count()
        self._layouts = itertools.count()
        self._given_uuids = tuple(uuids)
        self._given_mig_uuids = dict(mig_uuids)
        self._given_minors = tuple(minors)
        for spec in specs:
            self._build(spec)
        self._wire()

    def new_address(self) -> int:
        """A number no other handle, sample or event set has or had."""
        return next(self._addresses)

    def enumeration(self) -> list[SimulatedGpu]:
        return [gpu for gpu in self.gpus if gpu.enumerated]

    def gpu(self, number: int) -> SimulatedGpu:
        for gpu in self.gpus:
            if gpu.number == number:
                return gpu
        raise ValueError(f"no simulated GPU {number}; there are {[gpu.number for gpu in self.gpus]}")

    def current(self, gpu: SimulatedGpu) -> SimulatedGpu:
        gpu.advance(self.clock())
        return gpu

    def address_of(self, gpu: SimulatedGpu, instance: MigInstance | None = None) -> int:
        """The same device always has the same address, until something makes its handles stale."""
        for address, target in self.targets.items():
            if target.gpu is gpu and target.instance is instance:
                return address
        address = self.new_address()
        self.targets[address] = Target(gpu, instance)
        return address

    def place(self, load: SimulatedLoad) -> None:
        with self.lock:
            self.current(self.gpu(load.gpu)).place(load)

    def remove(self, pid: int) -> None:
        with self.lock:
            if not sum(self.current(gpu).evict(pid) for gpu in self.gpus):
                raise ValueError(f"no simulated process {pid}")

    def add(self, spec: str) -> list[int]:
        """Hot-plugs GPUs; their numbers."""
        with self.lock:
            specs = parse_spec(spec)
            if len(self.gpus) + len(specs) > MAX_GPUS:
                raise UsageError(f"adding {spec!r} would make more than {MAX_GPUS} GPUs on one node")
            added = [self._build(spec).number for spec in specs]
            self._wire()
            return added

    def unplug(self, number: int) -> None:
        with self.lock:
            gpu = self.gpu(number)
            self.forget_handles(gpu)
            self.gpus.remove(gpu)
            self._wire()

    def reset(self, number: int) -> None:
        with self.lock:
            gpu = self.current(self.gpu(number))
            gpu.lost, gpu.enumerated = False, True
            gpu.reset()
            self.forget_handles(gpu)

    def relayout(self, number: int, profiles: Sequence[str] | None) -> list[str]:
        """Another MIG layout (None: MIG off); the UUIDs of the new MIG devices. Handles of the old ones are stale."""
        with self.lock:
            gpu = self.current(self.gpu(number))
            chosen = None if profiles is None else parse_profiles(gpu.model, profiles)
            stale = [address for address, target in self.targets.items() if target.gpu is gpu and target.instance]
            for address in stale:
                del self.targets[address]
            self._cut(gpu, chosen)
            return [instance.uuid for instance in gpu.instances]

    def forget_handles(self, gpu: SimulatedGpu | None = None) -> None:
        """Makes every handle of one GPU, or of all, stale."""
        self.targets = {a: t for a, t in self.targets.items() if gpu is not None and t.gpu is not gpu}

    def _build(self, spec: GpuSpec) -> SimulatedGpu:
        number = next(self._numbers)
        gpu = SimulatedGpu(
            number=number,
            model=spec.model,
            uuid=_given(self._given_uuids, number) or f"GPU-{self._uuid('gpu', number)}",
            minor=self._minor(number),
            seed=self.seed,
            unrest=self.unrest,
            at=self.clock(),
            epoch=self.epoch,
        )
        if spec.profiles:
            self._cut(gpu, spec.profiles, self._given_mig_uuids)
        self.gpus.append(gpu)
        return gpu

    def _wire(self) -> None:
        """A GPU alone has no NVLink: a real H200 passed through by itself says "not supported"."""
        linked = [gpu for gpu in self.gpus if gpu.model.nvlinks]
        for gpu in linked:
            gpu.nvlinks = gpu.model.nvlinks if len(linked) > 1 else 0

    def _minor(self, number: int) -> int:
        given = _given(self._given_minors, number)
        return number if given is None else given

    def _cut(
        self,
        gpu: SimulatedGpu,
        profiles: Sequence[MigProfile] | None,
        given: Mapping[tuple[int, int], str] | None = None,
    ) -> None:
        if profiles is None:
            gpu.cut(None)
            return
        layout = next(self._layouts)
        uuids = [
            (given or {}).get((gpu.number, slot)) or f"MIG-{self._uuid('mig', gpu.number, layout, slot)}"
            for slot in range(len(profiles))
        ]
        gpu.cut(lay_out(gpu.model, profiles, uuids))

    def _uuid(self, *parts: object) -> uuid.UUID:
        named = (self.node, self.seed, *parts) if self.node else (self.seed, *parts)
        digest = hashlib.sha256("/".join(map(str, named)).encode()).digest()
        return uuid.UUID(bytes=digest[:16], version=4)


def _given(values: Sequence[_T], number: int) -> _T | None:
    return values[number] if number < len(values) else None
