"""A fake kernel driver that checks and records every byte of the ioctls."""

from __future__ import annotations

import ctypes
import mmap
import struct
from dataclasses import dataclass, field

from podgpu.node.gpu.nvml.switch_log import KernelCalls

ESCAPE_SIZES = {0x29: 16, 0x2A: 32, 0x2B: 32, 0x4E: 56}
CONTROL_SIZES = {
    0x201: 128,
    0x205: 32,
    0x21B: 12,
    0x20800122: 48,
    0x20800403: 8,
    0x20801238: 24,
    0x90CD0101: 8,
    0x90CD0102: 8,
    0x90CD0104: 0,
}
RING = 32768


@dataclass
class FakeKernel(KernelCalls):
    """One GPU at 0000:06:00.0, device /dev/nvidia3. `refuse`: control or class -> status of its
    failure.
    """

    refuse: dict[int, int] = field(default_factory=dict)
    missing: frozenset[str] = frozenset()
    register: tuple[int, int] = (0, 1)
    """Status and value of the busy register."""
    gpu_time: int = 1_000_000_000
    opened: dict[int, str] = field(default_factory=dict)
    allocated: dict[int, tuple[int, int, bytes]] = field(default_factory=dict)
    """Handle -> parent, class, parameters."""
    controls: list[tuple[int, int, bytes]] = field(default_factory=list)
    mapped: dict[int, mmap.mmap] = field(default_factory=dict)
    """Memory handle -> mapping."""
    register_reads: list[tuple[int, int, int]] = field(default_factory=list)
    """Operation, type and offset of every read of a register."""
    _next: int = 2
    _mapping: dict[int, int] = field(default_factory=dict)

    def open(self, path: str) -> int:
        if path in self.missing:
            raise FileNotFoundError(2, "No such file or directory")
        self._next += 1
        self.opened[self._next] = path
        return self._next

    def close(self, fd: int) -> None:
        del self.opened[fd]

    def map(self, fd: int, length: int) -> mmap.mmap:
        memory = mmap.mmap(-1, length)
        self.mapped[self._mapping[fd]] = memory
        return memory

    def ioctl(self, fd: int, request: int, buffer: bytearray) -> None:
        assert self.opened[fd] == "/dev/nvidiactl"
        assert request >> 30 == 3
        assert request >> 8 & 0xFF == ord("F")
        number, size = request & 0xFF, request >> 16 & 0x3FFF
        assert len(buffer) == size == ESCAPE_SIZES[number]
        {0x29: self._free, 0x2A: self._control, 0x2B: self._alloc, 0x4E: self._map}[number](buffer)

    def write(self, records: list[bytes], get: int = 0, dropped: int = 0) -> None:
        """Writes records into the ring buffer, like the driver. The first is at index `get`."""
        header, ring = self._memories()
        for place, record in enumerate(records):
            at = (get + place) % RING * 32
            ring[at : at + 32] = record
        struct.pack_into(
            "<IIQQQ", header, 0, get, (get + len(records)) % RING, len(records), dropped, 0
        )

    def _memories(self) -> tuple[mmap.mmap, mmap.mmap]:
        parameters = next(p for _, kind, p in self.allocated.values() if kind == 0x90CD)
        header, ring = struct.unpack_from("<II", parameters, 60)
        return self.mapped[header], self.mapped[ring]

    def _alloc(self, buffer: bytearray) -> None:
        root, parent, handle, kind, where, size, _ = struct.unpack("<IIIIQII", buffer)
        assert size == 0
        if kind == 0x41:
            assert (root, parent, handle) == (0, 0, 0)
            handle = 0xC1D00001
        wanted = {0x41: 0, 0x80: 56, 0x2080: 4, 0x90CE: 128, 0x90CD: 72}[kind]
        parameters = ctypes.string_at(where, wanted + 256) if wanted else b""
        assert not any(parameters[wanted:]), (
            "the kernel may read past the end, so the bytes there must be zero"
        )
        self.allocated[handle] = (parent, kind, parameters[:wanted])
        struct.pack_into("<I", buffer, 8, handle)
        struct.pack_into("<I", buffer, 28, self.refuse.get(kind, 0))

    def _control(self, buffer: bytearray) -> None:
        _, handle, command, flags, where, size, _ = struct.unpack("<IIIIQII", buffer)
        assert flags == 0
        assert size == CONTROL_SIZES[command]
        parameters = ctypes.string_at(where, size) if size else b""
        self.controls.append((handle, command, parameters))
        answer = self._answer(command, parameters)
        if answer:
            ctypes.memmove(where, answer, len(answer))
        struct.pack_into("<I", buffer, 28, self.refuse.get(command, 0))

    def _answer(self, command: int, parameters: bytes) -> bytes:
        if command == 0x201:
            return struct.pack("<2I", 0x10, 0x600) + b"\xff" * 120
        if command == 0x21B:
            (gpu,) = struct.unpack_from("<I", parameters)
            return struct.pack("<IIHH", gpu, 0, gpu >> 8, 0)
        if command == 0x205:
            return struct.pack("<IIIIIIIi", 0x600, 0, 5, 0, 0, 0, 0, 0)
        if command == 0x20800403:
            return struct.pack("<Q", self.gpu_time)
        if command == 0x20800122:
            self._read_register(parameters)
        return b""

    def _read_register(self, parameters: bytes) -> None:
        count, where = struct.unpack_from("<IQ", parameters, 20)
        assert count == 1
        assert not any(parameters[:20])
        assert not any(parameters[32:])
        operation = ctypes.string_at(where, 32)
        self.register_reads.append(
            (operation[0], operation[1], struct.unpack_from("<I", operation, 12)[0])
        )
        status, value = self.register
        changed = bytearray(operation)
        changed[2] = status
        struct.pack_into("<I", changed, 20, value)
        ctypes.memmove(where, bytes(changed), 32)

    def _map(self, buffer: bytearray) -> None:
        client, device, memory, _, offset, length, _, _, flags, fd = struct.unpack(
            "<IIIIQQQIIi4x", buffer
        )
        assert client == device
        assert offset == 0
        assert flags == 1, "the mapping must be read-only"
        assert self.opened[fd] == "/dev/nvidiactl"
        assert length == struct.unpack_from("<Q", self.allocated[memory][2], 64)[0]
        self._mapping[fd] = memory

    def _free(self, buffer: bytearray) -> None:
        root, _, handle, _ = struct.unpack("<IIII", buffer)
        assert root == handle
        self.allocated.clear()
