"""A fake libdcgm in C, which is compiled once. Tests configure it, and podgpu's ctypes code reads
it.
"""

from __future__ import annotations

import atexit
import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from ctypes import c_char_p, c_double, c_int64
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from podgpu.metrics.fields import Field, field_named
from podgpu.model import GpuReading
from podgpu.node.gpu.dcgm.connection import EngineAddress
from podgpu.node.gpu.dcgm.dcgm_telemetry import DcgmSettings, DcgmTelemetry
from podgpu.node.gpu.source import Telemetry
from tests.nodes.clock import FakeClock

SOURCE = Path(__file__).with_name("fake_libdcgm.c")
GPU, SWITCH, GI, CI, LINK, CPU, CORE = 1, 3, 4, 5, 6, 7, 8
TEMP, POWER, UTIL, FB_USED, NAME, UUID, GR_ACTIVE = 150, 155, 203, 252, 50, 54, 1001
INTERVAL = 10.0
ENGINE = EngineAddress("127.0.0.1:5555", "127.0.0.1")


@cache
def compiled() -> str:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here (cc or gcc): the fake libdcgm cannot be built")
    folder = mkdtemp(prefix="fake-libdcgm-")
    atexit.register(shutil.rmtree, folder)
    library = str(Path(folder) / "libdcgm.so.4")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, str(SOURCE)], check=True
    )
    return library


class Double:
    """Configures the fake library. `call("gpu", ...)` calls the C function `fake_gpu`."""

    def __init__(self) -> None:
        self.path = compiled()
        self._dll = ctypes.CDLL(self.path)
        self._dll.fake_address.restype = c_char_p
        self._dll.fake_watch.restype = c_double
        self.now = 1_700_000_000_000_000
        self.call("reset")

    def call(self, name: str, *arguments: object) -> object:
        function = getattr(self._dll, f"fake_{name}")
        return function(*map(_convert, arguments))

    def told(self, what: str) -> int:
        return int(self.call("told", what))  # type: ignore[call-overload]

    def tick(self) -> None:
        """Advances the time of the engine, so that later values are newer."""
        self.now += 1_000_000

    def double(self, entity: tuple[int, int], field: int, value: float, status: int = 0) -> None:
        self.call("double", *entity, field, self.now, status, float(value))

    def text(
        self, entity: tuple[int, int], field: int, value: str, live_only: bool = False
    ) -> None:
        self.call("text", *entity, field, self.now, 0, value, live_only)

    def gpu(self, index: int, mig: bool = False, model: str = "NVIDIA H100 80GB HBM3") -> None:
        self.call("gpu", index, uuid_of(index), f"00000000:{index + 0x18:02X}:00.0", model, mig)
        self.int((GPU, index), 55, index + 4)

    def speak(self, index: int, temperature: int = 40) -> None:
        """Sets new values of the GPU's basic fields."""
        self.int((GPU, index), TEMP, temperature)
        self.double((GPU, index), POWER, 123.456)
        self.int((GPU, index), UTIL, 77)
        self.int((GPU, index), FB_USED, 1024)

    def instance(self, entity: int, gpu: int, gi: int, profile: str) -> None:
        """Adds a MIG instance with one compute instance of the same number."""
        self.call("mig", GI, entity, GPU, gpu, gi, 0xFFFFFFFF)
        self.call("mig", CI, entity, GI, entity, gi, 0)
        self.text((GI, entity), NAME, profile, live_only=True)
        self.text((CI, entity), UUID, f"MIG-{gpu}-{gi}", live_only=True)

    # The last method, because it hides the type in annotations.
    def int(self, entity: tuple[int, int], field: int, value: int, status: int = 0) -> None:
        self.call("int", *entity, field, self.now, status, value)


def _convert(argument: object) -> object:
    """Converts an argument for ctypes. The C functions may have narrower integer parameters."""
    match argument:
        case str():
            return argument.encode()
        case float():
            return c_double(argument)
    return c_int64(argument)  # type: ignore[arg-type]


def uuid_of(index: int) -> str:
    return f"GPU-0000000{index}-aaaa-bbbb-cccc-dddddddddddd"


class Bench:
    """The fake library, telemetry that reads it, and a clock that tests advance."""

    def __init__(self, double: Double, driver: Telemetry | None = None, **settings: object) -> None:
        self.double = double
        self.clock = FakeClock()
        given = {"interval": INTERVAL, "library": double.path, "address": ENGINE} | settings
        self.telemetry = DcgmTelemetry(
            DcgmSettings(**given),  # type: ignore[arg-type]
            driver,
            count_expected=lambda: 2,
            clock=self.clock.monotonic,
        )

    def read(self, *names: str, index: int = 0) -> GpuReading:
        return self.read_fields(fields_named(*names), index)

    def read_fields(self, fields: Sequence[Field], index: int = 0) -> GpuReading:
        return self.telemetry.read(self.telemetry.inventory().gpus[index], fields)

    def pass_time(self, seconds: float = INTERVAL) -> None:
        self.clock.advance(seconds)


@cache
def fields_named(*names: str) -> tuple[Field, ...]:
    found = [field_named(name) for name in names]
    assert None not in found, names
    return tuple(f for f in found if f is not None)


PLAIN = (
    "DCGM_FI_DEV_GPU_TEMP",
    "DCGM_FI_DEV_POWER_USAGE",
    "DCGM_FI_DEV_GPU_UTIL",
    "DCGM_FI_DEV_FB_USED",
)
