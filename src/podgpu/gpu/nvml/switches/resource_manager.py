"""The resource manager's side of the kernel driver: this module owns every ioctl podgpu makes, and makes no other.

It opens the context-switch log of one GPU, empties it, tells the GPU's time and whether its engine is busy. What could
harm the kernel cannot be said here: sizes are constants beside their layouts, the one register is a constant and only
read, a log always has its subdevice and never a notification handle. Facts: NVIDIA's open kernel modules 515 to 595.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Final, Protocol

from podgpu.gpu.nvml.switches.records import RECORD, Doubt

_FREE: Final = 0x29
_CONTROL: Final = 0x2A
_ALLOC: Final = 0x2B
_MAP: Final = 0x4E

_CLIENT: Final = 0x41
_DEVICE: Final = 0x80
_SUBDEVICE: Final = 0x2080
_EVENT_BUFFER: Final = 0x90CD
_MEMORY: Final = 0x90CE

_ATTACHED_IDS: Final = 0x201
_ID_INFO: Final = 0x205
_PCI_INFO: Final = 0x21B
_READ_REGISTERS: Final = 0x20800122
_GPU_TIME: Final = 0x20800403
_BIND: Final = 0x20801238
_ENABLE: Final = 0x90CD0101
_TAKEN: Final = 0x90CD0102
_FLUSH: Final = 0x90CD0104

_RECORDS: Final = 32768
"""Three seconds at 5,000 switches a second; one physically contiguous MiB."""
_HEADER_BYTES: Final = 4096
_HEADER = struct.Struct("<IIQQQ")
"""get, put, count, dropped since they were last taken, dropped of the variable part."""
_PAYLOAD_BYTES: Final = 24
_PADDING: Final = 512
"""The kernel copies as many bytes as its own structure has: parameters are followed by zeros."""
_WRITE_BACK: Final = 5 << 29
_USER_READ_ONLY: Final = 1 << 22
_KEEP_OLDEST: Final = 1
_READ_ONLY_MAP: Final = 1
_NO_GPU: Final = (0, 0xFFFFFFFF)
_BUSY_REGISTER: Final = 0x40060C
"""Bit 0: the graphics and compute engine is busy. Measured on GH100, see `MEASURED`."""
_REFUSED_VALUE: Final = 0xBADF
_OLDEST_BRANCH: Final = 515


@dataclass(frozen=True, slots=True)
class Layout:
    """What differs between driver branches."""

    alloc_status: int
    """Offset of the status in the answer to an allocation."""
    memory_bytes: int
    """Size of a memory object's parameters."""
    drain_seconds: float
    """How often the log has to be emptied: old branches empty the hardware's ring only once a second by themselves."""


_LAYOUTS: Final = (
    (550, Layout(alloc_status=28, memory_bytes=128, drain_seconds=2.0)),
    (535, Layout(alloc_status=28, memory_bytes=120, drain_seconds=0.2)),
    (_OLDEST_BRANCH, Layout(alloc_status=24, memory_bytes=120, drain_seconds=0.2)),
)


def layout_of(driver_version: str) -> Layout:
    """By the driver's major version; a branch that nobody has seen is taken for the newest. Raises Doubt."""
    major = driver_version.split(".", 1)[0]
    branch = int(major) if major.isascii() and major.isdigit() else 0
    for first, layout in _LAYOUTS:
        if branch >= first:
            return layout
    raise Doubt("old_driver", f"driver {driver_version} has no context-switch log that podgpu can read (515 has)")


class Kernel(Protocol):
    """The four system calls. Tests put a driver of their own behind them."""

    def open(self, path: str) -> int: ...
    def ioctl(self, fd: int, request: int, buffer: bytearray) -> None: ...
    def map(self, fd: int, length: int) -> mmap.mmap: ...
    def close(self, fd: int) -> None: ...


class LinuxKernel:
    def open(self, path: str) -> int:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def ioctl(self, fd: int, request: int, buffer: bytearray) -> None:
        fcntl.ioctl(fd, request, buffer)

    def map(self, fd: int, length: int) -> mmap.mmap:
        return mmap.mmap(fd, length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)

    def close(self, fd: int) -> None:
        os.close(fd)


class ContextSwitchLog:
    """The log of one GPU, from the moment it is made. Not for two threads at once. Every method may raise Doubt."""

    def __init__(self, pci_bus_id: str, minor: int, layout: Layout, kernel: Kernel | None = None) -> None:
        self._kernel = kernel or LinuxKernel()
        self._layout = layout
        self._control_fd = self._device_fd = -1
        self._client = self._handles = 0
        self._maps: list[mmap.mmap] = []
        with ExitStack() as undo:
            undo.callback(self.close)
            self._control_fd = self._open("/dev/nvidiactl")
            self._client = self._allocate(0, _CLIENT, b"")
            self._device_fd = self._open(f"/dev/nvidia{minor}")
            self._subdevice = self._find_gpu(pci_bus_id)
            self._buffer, self._header, self._ring = self._make_buffer()
            self._bind()
            self._control(self._buffer, _ENABLE, struct.pack("<B3xI", 1, _KEEP_OLDEST))
            self._get = self._read_header()[0]
            undo.pop_all()

    @property
    def drain_seconds(self) -> float:
        return self._layout.drain_seconds

    def drain(self) -> bytes:
        """The records since the last time, oldest first."""
        self._control(self._buffer, _FLUSH, b"")
        _, put, _, dropped, _ = self._read_header()
        if dropped:
            raise Doubt("ring_overflow", f"{dropped} context switches did not fit into the log before it was read")
        if put >= _RECORDS:
            raise Doubt("bad_record", f"the context-switch log says its end is at {put} of {_RECORDS}")
        if put == self._get:
            return b""
        size, ring = RECORD.size, self._ring
        first = ring[self._get * size : (put if put > self._get else _RECORDS) * size]
        chunk = first if put > self._get else first + ring[: put * size]
        self._get = put
        self._control(self._buffer, _TAKEN, struct.pack("<II", put, 0))
        return chunk

    def now(self) -> int:
        """Nanoseconds by the GPU's clock, in which records are stamped."""
        (now,) = struct.unpack("<Q", self._control(self._subdevice, _GPU_TIME, bytes(8)))
        return int(now)

    def is_busy(self) -> bool:
        """Whether the engine works now. Needs CAP_SYS_ADMIN; without it the kernel's log has a line each time."""
        operation = ctypes.create_string_buffer(struct.pack("<BBBB4xIIIIII", 0, 0, 0, 0, 0, _BUSY_REGISTER, 0, 0, 0, 0))
        where = ctypes.addressof(operation)
        self._control(self._subdevice, _READ_REGISTERS, struct.pack("<IIIIIIQ16x", 0, 0, 0, 0, 0, 1, where))
        status, value = operation.raw[2], struct.unpack_from("<I", operation.raw, 20)[0]
        if status:
            raise Doubt("register_status", f"the driver refused to read the busy register (status {status})")
        if value >> 16 == _REFUSED_VALUE:
            raise Doubt("register_value", f"the busy register answered {value:#010x}, which is the hardware's refusal")
        return bool(value & 1)

    def close(self) -> None:
        """Lets go of everything; the kernel frees what hangs under the client."""
        while self._maps:
            self._maps.pop().close()
        if self._client:
            request = bytearray(struct.pack("<IIII", self._client, 0, self._client, 0))
            with suppress(Doubt):
                self._ioctl(_FREE, request)
            self._client = 0
        for fd in (self._device_fd, self._control_fd):
            if fd >= 0:
                self._kernel.close(fd)
        self._device_fd = self._control_fd = -1

    # What the log hangs on

    def _find_gpu(self, pci_bus_id: str) -> int:
        """The subdevice of the GPU at that place on the bus."""
        wanted = _parse_bus_id(pci_bus_id)
        attached = struct.unpack("<32I", self._control(self._client, _ATTACHED_IDS, b"\xff" * 128))
        for gpu_id in attached:
            if gpu_id not in _NO_GPU and self._place_of(gpu_id) == wanted:
                answer = self._control(self._client, _ID_INFO, struct.pack("<I28x", gpu_id))
                device_instance, subdevice_instance = struct.unpack_from("<II", answer, 8)
                device = self._allocate(self._client, _DEVICE, struct.pack("<I52x", device_instance))
                return self._allocate(device, _SUBDEVICE, struct.pack("<I", subdevice_instance))
        raise Doubt("gpu_not_found", f"the kernel driver has no GPU at {pci_bus_id} attached")

    def _place_of(self, gpu_id: int) -> tuple[int, int, int]:
        _, domain, bus, slot = struct.unpack(
            "<IIHH", self._control(self._client, _PCI_INFO, struct.pack("<I8x", gpu_id))
        )
        return domain, bus, slot

    def _make_buffer(self) -> tuple[int, mmap.mmap, mmap.mmap]:
        header, ring = self._make_memory(_HEADER_BYTES), self._make_memory(_RECORDS * RECORD.size)
        # Addresses out, record size and count, no variable part, no notification, the subdevice, the two memories.
        parameters = struct.pack(
            "<QQIIQIIQIIIIII", 0, 0, RECORD.size, _RECORDS, 0, 0, 0, 0, 0, self._subdevice, 0, header, ring, 0
        )
        buffer = self._allocate(self._client, _EVENT_BUFFER, parameters)
        return buffer, self._map(header, _HEADER_BYTES), self._map(ring, _RECORDS * RECORD.size)

    def _make_memory(self, size: int) -> int:
        parameters = bytearray(self._layout.memory_bytes)
        struct.pack_into("<II", parameters, 24, _WRITE_BACK, _USER_READ_ONLY)
        struct.pack_into("<Q", parameters, 64, size)
        return self._allocate(self._client, _MEMORY, bytes(parameters))

    def _bind(self) -> None:
        """To the switches of all users; those of other users come without a pid unless we are privileged."""
        request = struct.pack("<IIIIB3xI", self._buffer, _PAYLOAD_BYTES, 0, 0, 1, 0)
        self._control(self._subdevice, _BIND, request)

    def _read_header(self) -> tuple[int, int, int, int, int]:
        return _HEADER.unpack_from(self._header, 0)

    # The four escapes

    def _allocate(self, parent: int, kind: int, parameters: bytes) -> int:
        memory = ctypes.create_string_buffer(parameters + bytes(_PADDING)) if parameters else None
        where = ctypes.addressof(memory) if memory is not None else 0
        self._handles += 1
        handle = 0xCAFE0000 + self._handles if kind != _CLIENT else 0
        request = bytearray(struct.pack("<IIIIQII", self._client, parent, handle, kind, where, 0, 0))
        self._ioctl(_ALLOC, request)
        _check(request, self._layout.alloc_status, f"an object of class {kind:#x}")
        return int(struct.unpack_from("<I", request, 8)[0])

    def _control(self, handle: int, command: int, parameters: bytes) -> bytes:
        memory = ctypes.create_string_buffer(parameters, len(parameters)) if parameters else None
        where = ctypes.addressof(memory) if memory is not None else 0
        request = bytearray(struct.pack("<IIIIQII", self._client, handle, command, 0, where, len(parameters), 0))
        self._ioctl(_CONTROL, request)
        _check(request, 28, f"control {command:#x}")
        return memory.raw if memory is not None else b""

    def _map(self, memory: int, length: int) -> mmap.mmap:
        """Read only, through a descriptor of its own: the driver takes one mapping for each."""
        fd = self._open("/dev/nvidiactl")
        try:
            request = bytearray(
                struct.pack("<IIIIQQQIIi4x", self._client, self._client, memory, 0, 0, length, 0, 0, _READ_ONLY_MAP, fd)
            )
            self._ioctl(_MAP, request)
            _check(request, 40, "a mapping")
            mapped = self._kernel.map(fd, length)
        except (OSError, ValueError) as e:
            raise Doubt("rm_error", f"the context-switch log cannot be mapped: {e}") from e
        finally:
            self._kernel.close(fd)
        self._maps.append(mapped)
        return mapped

    def _open(self, path: str) -> int:
        try:
            return self._kernel.open(path)
        except OSError as e:
            raise Doubt("no_device_node", f"{path} cannot be opened: {e.strerror}") from e

    def _ioctl(self, number: int, request: bytearray) -> None:
        code = 3 << 30 | len(request) << 16 | ord("F") << 8 | number
        try:
            self._kernel.ioctl(self._control_fd, code, request)
        except OSError as e:
            raise Doubt("rm_error", f"the kernel driver refused call {number:#x}: {e.strerror}") from e


def _check(answer: bytearray, offset: int, what: str) -> None:
    (status,) = struct.unpack_from("<I", answer, offset)
    if status:
        raise Doubt("rm_error", f"the kernel driver refused {what} (status {status:#x})")


def _parse_bus_id(bus_id: str) -> tuple[int, int, int]:
    """`00000000:3B:00.0` as domain, bus and slot."""
    try:
        domain, bus, rest = bus_id.split(":")
        return int(domain, 16), int(bus, 16), int(rest.split(".")[0], 16)
    except ValueError as e:
        raise Doubt("gpu_not_found", f"{bus_id!r} is not a place on the PCI bus") from e
