"""Tests every byte of the ioctls for the context-switch log."""

from __future__ import annotations

import struct

import pytest

from podgpu.node.gpu.nvml.switch_attribution import RECORD, SwitchLogError
from podgpu.node.gpu.nvml.switch_log import ContextSwitchLog, check_driver
from tests.gpu.switches.fake_kernel import FakeKernel

BUS_ID = "00000000:06:00.0"


def open_log(kernel: FakeKernel) -> ContextSwitchLog:
    return ContextSwitchLog(BUS_ID, 3, kernel)


def record(number: int, tag: int = 6, pid: int = 7, at: int = 0) -> bytes:
    return RECORD.pack(2, 0, 0, tag, 0, number % 65536, 1, pid, 0, 255, 255, at)


def test_allocated_objects() -> None:
    kernel = FakeKernel()
    open_log(kernel)
    by_class = {
        kind: (handle, parent, parameters)
        for handle, (parent, kind, parameters) in kernel.allocated.items()
    }
    client = by_class[0x41][0]
    device, subdevice = by_class[0x80], by_class[0x2080]
    assert device[1:] == (client, struct.pack("<I52x", 5))
    assert subdevice[1:] == (device[0], struct.pack("<I", 0))
    header, ring = [h for h, (_, kind, _) in kernel.allocated.items() if kind == 0x90CE]
    for memory, size in ((header, 4096), (ring, 32768 * 32)):
        parameters = kernel.allocated[memory][2]
        assert struct.unpack_from("<II", parameters, 24) == (5 << 29, 1 << 22)
        assert struct.unpack_from("<Q", parameters, 64) == (size,)
    buffer = struct.unpack("<QQIIQIIQIIIIII", by_class[0x90CD][2])
    record_size, count, notification, its_subdevice = buffer[2], buffer[3], buffer[7], buffer[9]
    assert (record_size, count, notification, its_subdevice) == (32, 32768, 0, subdevice[0])
    assert buffer[11:] == (header, ring, 0)


def test_records_are_read_once_and_in_order_across_the_end_of_the_ring() -> None:
    kernel = FakeKernel()
    log = open_log(kernel)
    assert log.drain() == b""
    first = [record(n) for n in range(32766)]
    kernel.write(first)
    assert log.drain() == b"".join(first)
    more = [record(n) for n in range(32766, 32771)]
    kernel.write(more, get=32766)
    assert log.drain() == b"".join(more)
    assert log.drain() == b""
    taken = [struct.unpack("<II", p) for _, command, p in kernel.controls if command == 0x90CD0102]
    assert taken == [(32766, 0), (3, 0)]


def test_only_the_busy_register_is_read() -> None:
    kernel = FakeKernel(register=(0, 0x3))
    log = open_log(kernel)
    assert log.is_busy() is True
    kernel.register = (0, 0x2)
    assert log.is_busy() is False
    assert kernel.register_reads == [(0, 0, 0x40060C)] * 2


@pytest.mark.parametrize(
    "refused", [0x41, 0x80, 0x2080, 0x90CE, 0x90CD, 0x201, 0x20801238, 0x90CD0101]
)
def test_after_a_refusal_nothing_stays_open(refused: int) -> None:
    kernel = FakeKernel(refuse={refused: 0x1F})
    with pytest.raises(SwitchLogError, match="status 0x1f") as caught:
        open_log(kernel)
    assert caught.value.reason == "rm_error"
    assert kernel.opened == {}


def test_a_missing_gpu_and_a_missing_device_node() -> None:
    kernel = FakeKernel()
    with pytest.raises(SwitchLogError, match=r"no GPU at PCI address 00000000:41:00\.0"):
        ContextSwitchLog("00000000:41:00.0", 3, kernel)
    assert kernel.opened == {}
    with pytest.raises(SwitchLogError, match="/dev/nvidia3 cannot be opened"):
        open_log(FakeKernel(missing=frozenset({"/dev/nvidia3"})))


@pytest.mark.parametrize("version", ["470.223.02", "535.104.05", "", "x.1"])
def test_older_drivers_are_refused(version: str) -> None:
    check_driver("550.54.14")
    check_driver("999.1")
    with pytest.raises(SwitchLogError) as caught:
        check_driver(version)
    assert caught.value.reason == "old_driver"
