"""Reads the context-switch log of one GPU through ioctls of NVIDIA's kernel driver.

Only this module uses ioctls. For safety, parameters that could harm the kernel are constants, and
registers are only read. The layouts of the structures are from NVIDIA's open kernel modules 550 to
595.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import re
import struct
from contextlib import ExitStack, suppress
from typing import Final

from podgpu.node.gpu.nvml.switch_attribution import RECORD, SwitchLogError

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
_UPDATE_GET: Final = 0x90CD0102
_FLUSH: Final = 0x90CD0104

_RECORDS: Final = 32768
"""Capacity of the log. It is full after 3 seconds at 5,000 switches per second.

Needs 1 MiB of contiguous memory.
"""
_HEADER_BYTES: Final = 4096
# Position to read (get), position to write (put), count, records dropped since the last reading,
# unused.
_HEADER = struct.Struct("<IIQQQ")
_PAYLOAD_BYTES: Final = 24  # of a record, without its header of 8 bytes
_PADDING: Final = 512
"""Number of zero bytes after the parameters.

The kernel copies more bytes if its own structure is larger.
"""
_WRITE_BACK: Final = 5 << 29
_USER_READ_ONLY: Final = 1 << 22
_KEEP_OLDEST: Final = 1
_READ_ONLY_MAP: Final = 1
_NO_GPU: Final = (0, 0xFFFFFFFF)  # unused places in the list of GPUs
_BUSY_REGISTER: Final = 0x40060C
"""Register whose bit 0 is set while the graphics and compute engine is busy.

See `MEASURED_ARCHITECTURES`.
"""
_REFUSED_VALUE: Final = 0xBADF  # upper half of the value if the GPU refuses the reading
_OLDEST_BRANCH: Final = 550
"""Oldest supported driver. The structures of older drivers have another layout."""
_MEMORY_BYTES: Final = 128  # size of a memory object's parameters


def check_driver(version: str) -> None:
    """Raises SwitchLogError if the driver is older than `_OLDEST_BRANCH`."""
    major = re.match(r"\d+", version, re.ASCII)
    if major is None or int(major[0]) < _OLDEST_BRANCH:
        raise SwitchLogError(
            "old_driver",
            f"the context-switch log of driver {version} cannot be read; "
            f"version {_OLDEST_BRANCH} or later is required",
        )


class KernelCalls:
    """The system calls that this module uses. Tests override them."""

    def open(self, path: str) -> int:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def ioctl(self, fd: int, request: int, buffer: bytearray) -> None:
        fcntl.ioctl(fd, request, buffer)

    def map(self, fd: int, length: int) -> mmap.mmap:
        return mmap.mmap(fd, length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)

    def close(self, fd: int) -> None:
        os.close(fd)


class ContextSwitchLog:
    """The open log of one GPU. Not thread-safe. Every method may raise SwitchLogError."""

    def __init__(self, pci_bus_id: str, minor: int, kernel: KernelCalls | None = None) -> None:
        self._kernel = kernel or KernelCalls()
        self._control_fd = -1
        self._device_fd = -1
        self._client = 0  # handle; 0 if it does not exist
        self._handles = 0  # number of handles that were made
        self._maps: list[mmap.mmap] = []

        with ExitStack() as undo:
            undo.callback(self.close)
            self._control_fd = self._open("/dev/nvidiactl")
            self._client = self._allocate(0, _CLIENT, b"")
            self._device_fd = self._open(f"/dev/nvidia{minor}")
            self._subdevice = self._find_gpu(pci_bus_id)
            self._buffer, self._header, self._ring = self._make_buffer()

            # Subscribes to the switches of all users. Without CAP_SYS_ADMIN, records of other users
            # have no pid.
            subscription = struct.pack("<II8xB7x", self._buffer, _PAYLOAD_BYTES, 1)
            self._control(self._subdevice, _BIND, subscription)
            self._control(self._buffer, _ENABLE, struct.pack("<B3xI", 1, _KEEP_OLDEST))

            self._get: int = _HEADER.unpack_from(self._header)[0]
            undo.pop_all()

    def drain(self) -> bytes:
        """Returns the records since the last call, oldest first."""
        self._control(self._buffer, _FLUSH, b"")
        _, put, _, dropped, _ = _HEADER.unpack_from(self._header)
        if dropped:
            raise SwitchLogError(
                "ring_overflow", f"{dropped} context switches were lost because the log was full"
            )

        if put == self._get:
            return b""

        start = self._get * RECORD.size
        end = put * RECORD.size
        chunk = self._ring[start:end]
        # The records continue at the begin of the ring.
        if end < start:
            chunk = self._ring[start:] + self._ring[:end]
        self._get = put
        self._control(self._buffer, _UPDATE_GET, struct.pack("<II", put, 0))
        return chunk

    def now(self) -> int:
        """Returns the GPU's clock in nanoseconds. Timestamps of records are from the same clock."""
        (now,) = struct.unpack("<Q", self._control(self._subdevice, _GPU_TIME, bytes(8)))
        return int(now)

    def is_busy(self) -> bool:
        """Returns True if the engine is busy.

        Without CAP_SYS_ADMIN, each call writes a line to the kernel log.
        """
        # The request has the number of operations, and the address of the only one.
        operation = ctypes.create_string_buffer(struct.pack("<12xI16x", _BUSY_REGISTER))
        request = struct.pack("<20xIQ16x", 1, ctypes.addressof(operation))
        self._control(self._subdevice, _READ_REGISTERS, request)

        # The kernel writes its answer into the operation.
        status = operation.raw[2]
        (value,) = struct.unpack_from("<I", operation.raw, 20)

        if status or value >> 16 == _REFUSED_VALUE:
            raise SwitchLogError(
                "register_value",
                f"the busy register cannot be read (status {status}, value {value:#010x})",
            )
        return bool(value & 1)

    def close(self) -> None:
        """Closes the log. The kernel frees all its objects."""
        while self._maps:
            self._maps.pop().close()

        if self._client:
            request = bytearray(struct.pack("<IIII", self._client, 0, self._client, 0))
            with suppress(SwitchLogError):
                self._ioctl(_FREE, request, status_offset=12, what="the release of its objects")
            self._client = 0

        for fd in (self._device_fd, self._control_fd):
            if fd >= 0:
                self._kernel.close(fd)
        self._device_fd = -1
        self._control_fd = -1

    def _find_gpu(self, pci_bus_id: str) -> int:
        """Returns the handle of the GPU with this PCI bus id, such as 00000000:04:00.0."""
        wanted, _, _ = pci_bus_id.lower().partition(".")
        attached = struct.unpack("<32I", self._control(self._client, _ATTACHED_IDS, b"\xff" * 128))
        for gpu_id in attached:
            if gpu_id in _NO_GPU:
                continue

            answer = self._control(self._client, _PCI_INFO, struct.pack("<I8x", gpu_id))
            _, domain, bus, slot = struct.unpack("<IIHH", answer)
            if f"{domain:08x}:{bus:02x}:{slot:02x}" == wanted:
                return self._allocate_gpu(gpu_id)
        raise SwitchLogError(
            "gpu_not_found", f"the kernel driver has no GPU at PCI address {pci_bus_id}"
        )

    def _allocate_gpu(self, gpu_id: int) -> int:
        question = struct.pack("<I28x", gpu_id)
        answer = self._control(self._client, _ID_INFO, question)
        device_instance, subdevice_instance = struct.unpack_from("<II", answer, 8)

        parameters = struct.pack("<I52x", device_instance)
        device = self._allocate(self._client, _DEVICE, parameters)
        parameters = struct.pack("<I", subdevice_instance)
        return self._allocate(device, _SUBDEVICE, parameters)

    def _make_buffer(self) -> tuple[int, mmap.mmap, mmap.mmap]:
        ring_bytes = _RECORDS * RECORD.size
        header = self._make_memory(_HEADER_BYTES)
        ring = self._make_memory(ring_bytes)

        # The parameters are two output addresses, size and number of records, variable data (none),
        # notification (none), subdevice and two memory handles. Other values for subdevice or
        # notification are unsafe.
        parameters = struct.pack(
            "<16xII28xI4xII4x", RECORD.size, _RECORDS, self._subdevice, header, ring
        )

        buffer = self._allocate(self._client, _EVENT_BUFFER, parameters)
        return buffer, self._map(header, _HEADER_BYTES), self._map(ring, ring_bytes)

    def _make_memory(self, size: int) -> int:
        parameters = bytearray(_MEMORY_BYTES)
        struct.pack_into("<II", parameters, 24, _WRITE_BACK, _USER_READ_ONLY)
        struct.pack_into("<Q", parameters, 64, size)
        return self._allocate(self._client, _MEMORY, bytes(parameters))

    def _allocate(self, parent: int, kind: int, parameters: bytes) -> int:
        # Must exist until the kernel has read it.
        memory = None
        if parameters:
            memory = ctypes.create_string_buffer(parameters + bytes(_PADDING))
        address = 0 if memory is None else ctypes.addressof(memory)

        # The kernel chooses the handle of a client, and the client those of its objects. They only
        # need to differ.
        self._handles += 1
        handle = 0
        if kind != _CLIENT:
            handle = 0xCAFE0000 + self._handles
        packed = struct.pack("<IIIIQII", self._client, parent, handle, kind, address, 0, 0)
        request = bytearray(packed)
        self._ioctl(_ALLOC, request, status_offset=28, what=f"an object of class {kind:#x}")

        (allocated,) = struct.unpack_from("<I", request, 8)
        return int(allocated)

    def _control(self, handle: int, command: int, parameters: bytes) -> bytes:
        size = len(parameters)
        # Must exist until the kernel has written the answer to it.
        memory = None
        if parameters:
            memory = ctypes.create_string_buffer(parameters, size)
        address = 0 if memory is None else ctypes.addressof(memory)

        packed = struct.pack("<IIIIQII", self._client, handle, command, 0, address, size, 0)
        self._ioctl(_CONTROL, bytearray(packed), status_offset=28, what=f"control {command:#x}")
        if memory is None:
            return b""
        return memory.raw

    def _map(self, memory: int, length: int) -> mmap.mmap:
        """Maps memory read-only. Each mapping needs its own file descriptor."""
        fd = self._open("/dev/nvidiactl")
        try:
            client = self._client
            request = struct.pack(
                "<III12xQ12xIi4x", client, client, memory, length, _READ_ONLY_MAP, fd
            )
            self._ioctl(_MAP, bytearray(request), status_offset=40, what="a mapping")
            mapped = self._kernel.map(fd, length)
        except (OSError, ValueError) as e:
            raise SwitchLogError("rm_error", f"the context-switch log cannot be mapped: {e}") from e
        finally:
            self._kernel.close(fd)

        self._maps.append(mapped)
        return mapped

    def _open(self, path: str) -> int:
        try:
            return self._kernel.open(path)
        except OSError as e:
            raise SwitchLogError("no_device_node", f"{path} cannot be opened: {e.strerror}") from e

    def _ioctl(self, number: int, request: bytearray, status_offset: int, what: str) -> None:
        """`status_offset`: place of the driver's status in the request. `what`: for messages."""
        # _IOWR('F', number, request) of the kernel
        code = 3 << 30 | len(request) << 16 | ord("F") << 8 | number
        try:
            self._kernel.ioctl(self._control_fd, code, request)
        except OSError as e:
            raise SwitchLogError(
                "rm_error", f"the kernel driver failed for {what}: {e.strerror}"
            ) from e

        (status,) = struct.unpack_from("<I", request, status_offset)
        if status:
            raise SwitchLogError(
                "rm_error", f"the kernel driver rejected {what} (status {status:#x})"
            )
