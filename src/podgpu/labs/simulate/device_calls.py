"""Implements the NVML calls of simulated devices: functions, field values and GPM samples.

Results have the types of pynvml. Functions that are missing in GPU_CALLS and MIG_CALLS are not
supported.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, NoReturn

import pynvml

from podgpu.labs.simulate.gpu import (
    FULL_CELSIUS,
    IDLE_CELSIUS,
    LoadActivity,
    SimulatedGpu,
    SimulatedInstance,
    SimulatedLoad,
)
from podgpu.labs.simulate.models import AMPERE, HOPPER, MIB, GpuModel

NO_INSTANCE = 0xFFFFFFFF
ALL_LINKS = 0xFFFFFFFF
_SAMPLING_PERIOD_US = 100_000
_MAX_CELSIUS = 87
# Bytes per busy second.
_PCIE_TX_BYTES = 6_000_000
_PCIE_RX_BYTES = 20_000_000
_NVLINK_BYTES = 400_000_000  # per link and direction
_PROCESS_KINDS = {"Compute": "compute", "Graphics": "graphics", "MPSCompute": "mps"}


def pointer_to(address: int, pointer_type: Any) -> Any:
    """Creates a handle, a pointer of pynvml's type.

    The address only identifies an object and is never dereferenced.
    """
    return ctypes.cast(ctypes.c_void_p(address), pointer_type)


def address_in(handle: Any) -> int:
    """Returns the address in a handle, or 0 if the argument is not a handle."""
    try:
        return ctypes.cast(handle, ctypes.c_void_p).value or 0
    except ctypes.ArgumentError:
        return 0


def raise_error(code: int = pynvml.NVML_ERROR_NOT_SUPPORTED) -> NoReturn:
    """Raises NVMLError. This is a function, because a lambda cannot contain a raise statement."""
    raise pynvml.NVMLError(code)


def fill(struct: Any, **values: Any) -> Any:
    for name, value in values.items():
        setattr(struct, name, value)
    return struct


def pci_bus_id(gpu: SimulatedGpu) -> str:
    return f"00000000:{4 + 2 * gpu.number:02X}:00.0"


def _pci_info(gpu: SimulatedGpu) -> Any:
    bus_id = pci_bus_id(gpu)
    return fill(
        pynvml.nvmlPciInfo_t(),
        busIdLegacy=bus_id[4:],
        busId=bus_id,
        bus=4 + 2 * gpu.number,
        pciDeviceId=gpu.model.pci_device,
        pciSubSystemId=0x18BF10DE,
    )


def _memory(
    gpu: SimulatedGpu, instance: SimulatedInstance | None = None, version: int | None = None
) -> Any:
    if instance is None:
        total = gpu.model.memory
        reserved = gpu.model.reserved
        used = gpu.memory_used()
    else:
        total = instance.profile.memory_mib * MIB
        reserved = 16 * MIB * instance.profile.memory_slices
        used = gpu.memory_used(instance.gi_id)

    free = total - reserved - used
    if version is None:
        # The first version of the structure includes reserved memory in `used`.
        return fill(pynvml.c_nvmlMemory_t(), total=total, free=free, used=used + reserved)

    struct = pynvml.c_nvmlMemory_v2_t()
    return fill(struct, version=version, total=total, reserved=reserved, free=free, used=used)


def _utilisation(gpu: SimulatedGpu) -> Any:
    activity = gpu.activity.device
    return fill(
        pynvml.c_nvmlUtilization_t(),
        gpu=round(100 * activity.busy),
        memory=round(100 * activity.dram),
    )


def _clock(gpu: SimulatedGpu, kind: int) -> int:
    """Returns a clock by its NVML constant: graphics, SM, memory or video.

    The graphics clock equals the SM clock.
    """
    idle, boost = _clocks(gpu.model, kind)
    if not gpu.activity.device.busy:
        return idle
    if kind in (pynvml.NVML_CLOCK_GRAPHICS, pynvml.NVML_CLOCK_SM):
        return round(boost * gpu.relative_clock)
    return boost


def _clocks(model: GpuModel, kind: int) -> tuple[int, int]:
    return (model.sm_clock, model.sm_clock, model.memory_clock, model.video_clock)[kind]


def _threshold(gpu: SimulatedGpu, which: int) -> Any:
    offsets = {
        pynvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN: 8,
        pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN: 2,
        pynvml.NVML_TEMPERATURE_THRESHOLD_GPU_MAX: 0,
    }
    if gpu.model.hbm:
        offsets[pynvml.NVML_TEMPERATURE_THRESHOLD_MEM_MAX] = 8
    if which not in offsets:
        raise_error()
    return _MAX_CELSIUS + offsets[which]


def _fabric_info(gpu: SimulatedGpu, pointer: Any) -> None:
    """Implements nvmlDeviceGetGpuFabricInfoV, which fills a structure by reference."""
    if gpu.model.architecture < HOPPER:
        raise_error()
    fill(pointer._obj, state=gpu.fabric_state)


def list_processes(loads: Iterable[SimulatedLoad], function: str) -> list[Any]:
    """Implements nvmlDeviceGet<kind>RunningProcesses, with or without a suffix such as `_v3`."""
    kind, _, _ = function.removeprefix("nvmlDeviceGet").partition("RunningProcesses")
    processes = []
    for load in loads:
        if load.kind != _PROCESS_KINDS[kind]:
            continue
        gpu_instance = NO_INSTANCE
        compute_instance = NO_INSTANCE
        if load.gi_id is not None:
            gpu_instance = load.gi_id
            compute_instance = 0
        process = {
            "pid": load.pid,
            "usedGpuMemory": load.memory,
            "gpuInstanceId": gpu_instance,
            "computeInstanceId": compute_instance,
        }
        processes.append(pynvml.nvmlFriendlyObject(process))
    return processes


def _samples(gpu: SimulatedGpu, kind: int, since_us: int) -> Any:
    """Implements nvmlDeviceGetSamples. Simulates only utilisation samples."""
    if kind != pynvml.NVML_GPU_UTILIZATION_SAMPLES:
        raise_error()

    samples = []
    for seen in gpu.samples(since_us):
        sample = fill(pynvml.c_nvmlSample_t(), timeStamp=seen.wall_us)
        sample.sampleValue.uiVal = round(100 * sum(seen.shares.values()))
        samples.append(sample)

    if not samples:
        raise_error(pynvml.NVML_ERROR_NOT_FOUND)
    return pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, samples


def _process_utilisation(kind: type[Any], gpu: SimulatedGpu, since_us: int) -> Any:
    """Implements both NVML functions for process utilisation.

    They return structures of different types (`kind`).
    """
    entries = []
    for pid, last_ran, mean in gpu.process_means(since_us):
        percent = round(100 * mean)
        entry = fill(kind(), pid=pid, timeStamp=last_ran, smUtil=percent)
        entries.append(entry)
    if not entries:
        raise_error(pynvml.NVML_ERROR_NOT_FOUND)
    return entries


def _where(has: Callable[[SimulatedGpu], bool], read: Callable[..., Any]) -> Callable[..., Any]:
    return lambda gpu, *arguments: read(gpu, *arguments) if has(gpu) else raise_error()


def _without_mig(read: Callable[..., Any]) -> Callable[..., Any]:
    return _where(lambda gpu: not gpu.mig_enabled, read)


_HAS_ECC: Callable[[SimulatedGpu], bool] = lambda gpu: gpu.model.ecc  # noqa: E731
_LIMIT: Callable[[SimulatedGpu], int] = lambda gpu: gpu.model.power[2] * 1000  # noqa: E731

GPU_CALLS: dict[str, Callable[..., Any]] = {
    "nvmlDeviceGetName": lambda gpu: gpu.model.name,
    "nvmlDeviceGetUUID": lambda gpu: gpu.uuid,
    "nvmlDeviceGetPciInfo": _pci_info,
    "nvmlDeviceGetMinorNumber": lambda gpu: gpu.minor,
    "nvmlDeviceGetSerial": lambda gpu: f"165000000{gpu.number:04d}",
    "nvmlDeviceGetBrand": lambda gpu: gpu.model.brand,
    "nvmlDeviceGetArchitecture": lambda gpu: gpu.model.architecture,
    "nvmlDeviceGetCudaComputeCapability": lambda gpu: gpu.model.compute_capability,
    "nvmlDeviceGetVbiosVersion": lambda gpu: f"{gpu.model.pci_device >> 24:02X}.00.A5.00.1A",
    "nvmlDeviceGetMigMode": _where(
        lambda gpu: bool(gpu.model.profiles), lambda gpu: [int(gpu.mig_enabled)] * 2
    ),
    "nvmlDeviceGetMaxMigDeviceCount": lambda gpu: (
        gpu.model.compute_slices if gpu.mig_enabled else 0
    ),
    "nvmlDeviceGetMemoryInfo": lambda gpu, version=None: _memory(gpu, None, version),
    "nvmlDeviceGetUtilizationRates": _without_mig(_utilisation),
    "nvmlDeviceGetEncoderUtilization": _without_mig(lambda gpu: [0, _SAMPLING_PERIOD_US]),
    "nvmlDeviceGetDecoderUtilization": _without_mig(lambda gpu: [0, _SAMPLING_PERIOD_US]),
    "nvmlDeviceGetPowerUsage": lambda gpu: gpu.milliwatts,
    "nvmlDeviceGetEnforcedPowerLimit": _LIMIT,
    "nvmlDeviceGetPowerManagementLimit": _LIMIT,
    "nvmlDeviceGetPowerManagementDefaultLimit": _LIMIT,
    "nvmlDeviceGetPowerManagementLimitConstraints": lambda gpu: [
        gpu.model.power[1] * 1000,
        _LIMIT(gpu),
    ],
    "nvmlDeviceGetTotalEnergyConsumption": lambda gpu: gpu.energy_mj,
    "nvmlDeviceGetClockInfo": _clock,
    "nvmlDeviceGetMaxClockInfo": lambda gpu, kind: _clocks(gpu.model, kind)[1],
    "nvmlDeviceGetCurrentClocksEventReasons": lambda gpu: (
        0 if gpu.activity.device.busy else pynvml.nvmlClocksEventReasonGpuIdle
    ),
    "nvmlDeviceGetPerformanceState": lambda gpu: (
        0 if gpu.activity.device.busy else gpu.model.idle_pstate
    ),
    "nvmlDeviceGetTemperature": lambda gpu, sensor: round(gpu.celsius),
    "nvmlDeviceGetTemperatureThreshold": _threshold,
    "nvmlDeviceGetFanSpeed": _where(
        lambda gpu: gpu.model.fan,
        lambda gpu: round(
            30 + 60 * max(0.0, gpu.celsius - IDLE_CELSIUS) / (FULL_CELSIUS - IDLE_CELSIUS)
        ),
    ),
    "nvmlDeviceGetTotalEccErrors": _where(_HAS_ECC, lambda gpu, error, counter: 0),
    "nvmlDeviceGetRemappedRows": _where(
        lambda gpu: gpu.model.ecc and gpu.model.architecture >= AMPERE, lambda gpu: (0, 0, 0, 0)
    ),
    "nvmlDeviceGetCurrPcieLinkGeneration": lambda gpu: gpu.model.pcie_generation,
    "nvmlDeviceGetMaxPcieLinkGeneration": lambda gpu: gpu.model.pcie_generation,
    "nvmlDeviceGetCurrPcieLinkWidth": lambda gpu: 16,
    "nvmlDeviceGetMaxPcieLinkWidth": lambda gpu: 16,
    "nvmlDeviceGetPcieReplayCounter": lambda gpu: 0,
    "nvmlDeviceGetPersistenceMode": lambda gpu: 1,
    "nvmlDeviceGetComputeMode": lambda gpu: 0,
    "nvmlDeviceGetGridLicensableFeatures": lambda gpu: pynvml.c_nvmlGridLicensableFeatures_v4_t(),
    "nvmlDeviceGetGpuFabricInfoV": _fabric_info,
    "nvmlDeviceGetSamples": _without_mig(_samples),
    "nvmlDeviceGetProcessUtilization": _without_mig(
        partial(_process_utilisation, pynvml.c_nvmlProcessUtilizationSample_t)
    ),
    "nvmlDeviceGetProcessesUtilizationInfo": _without_mig(
        partial(_process_utilisation, pynvml.c_nvmlProcessUtilizationInfo_v1_t)
    ),
    "nvmlDeviceGetGpuInstanceId": lambda gpu: raise_error(pynvml.NVML_ERROR_INVALID_ARGUMENT),
}

MIG_CALLS: dict[str, Callable[..., Any]] = {
    "nvmlDeviceGetName": lambda gpu, instance: f"{gpu.model.name} MIG {instance.profile.name}",
    "nvmlDeviceGetUUID": lambda gpu, instance: instance.uuid,
    "nvmlDeviceGetGpuInstanceId": lambda gpu, instance: instance.gi_id,
    "nvmlDeviceGetMemoryInfo": _memory,
    "nvmlDeviceGetMaxMigDeviceCount": lambda gpu, instance: 0,
}


Reader = Callable[[SimulatedGpu, int], int | None]
"""(GPU, scope) -> value, or None if not supported."""


def read_field_values(gpu: SimulatedGpu, fields: Iterable[Any]) -> Any:
    """Implements nvmlDeviceGetFieldValues. `fields` are ids, or pairs of id and scope."""
    wanted = [entry if isinstance(entry, tuple | list) else (entry, 0) for entry in fields]
    values = (pynvml.c_nvmlFieldValue_t * len(wanted))()
    for value, (field_id, scope) in zip(values, wanted, strict=True):
        reader = _FIELDS.get(field_id)
        number = reader(gpu, scope) if reader else None

        value.fieldId = field_id
        value.scopeId = scope
        value.timestamp = gpu.wall_us
        value.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
        value.value.ullVal = number or 0
        value.nvmlReturn = _code_of(number)
    return values


def _code_of(value: float | None) -> int:
    """Returns NVML's result code for a value, which is None if it is not supported."""
    return int(pynvml.NVML_ERROR_NOT_SUPPORTED if value is None else pynvml.NVML_SUCCESS)


def _value_where(has: Callable[[SimulatedGpu], object], value: int = 0) -> Reader:
    return lambda gpu, scope: value if has(gpu) else None


def _nvlink_kib(gpu: SimulatedGpu, scope: int) -> int | None:
    """Returns the KiB sent or received since the last reset.

    `scope`: number of a link, or ALL_LINKS.
    """
    kib = int(gpu.meter.busy * _NVLINK_BYTES / 1024)
    if scope < gpu.nvlinks:
        return kib
    if scope == ALL_LINKS and gpu.nvlinks:
        return kib * gpu.nvlinks
    return None


_FIELDS: dict[int, Reader] = {
    # ECC mode: current and pending
    **dict.fromkeys((1, 2), _value_where(_HAS_ECC, 1)),
    # NVLink errors: CRC of flits and of data, replays, recoveries
    **dict.fromkeys((38, 45, 52, 59), _value_where(lambda gpu: gpu.nvlinks)),
    # time with reduced clocks, by reason
    **dict.fromkeys((74, 75, 76, 77, 79, 269, 270, 271), lambda gpu, scope: 0),
    # the same because of low utilisation
    78: lambda gpu, scope: int(gpu.idle_seconds * 1e9),
    # NVLink data sent and received
    **dict.fromkeys((138, 139), _nvlink_kib),
    # memory temperature
    82: lambda gpu, scope: (
        round(gpu.celsius - 2 + 8 * gpu.activity.device.dram) if gpu.model.hbm else None
    ),
    # recovery action
    230: lambda gpu, scope: gpu.recovery,
    # state of a link: 1 is active
    165: lambda gpu, scope: None if scope >= gpu.nvlinks else 1,
}


_PERCENT: dict[int, tuple[float, float, float]] = {
    1: (1.0, 0.0, 0.0),  # graphics engine
    2: (0.6, 0.4, 0.0),  # SM
    3: (0.1, 0.1, 0.0),  # SM occupancy
    5: (0.0, 1.0, 0.0),  # any tensor
    10: (0.0, 0.0, 1.0),  # DRAM bandwidth
    11: (0.0, 0.0, 0.0),  # FP64
    12: (0.2, -0.2, 0.0),  # FP32, which is used only while the tensor cores are idle
    13: (0.05, -0.05, 0.0),  # FP16
}
"""GPM metric -> weights of busy, tensor and DRAM time.

The weighted sum of these times is the metric's value.
"""


class GpmSample(NamedTuple):
    gpu: int | None = None  # number of the GPU; None until the sample is filled
    gi_id: int | None = None
    at: float = 0.0
    nvlinks: int = 0
    meter: LoadActivity = LoadActivity()


def evaluate_gpm(request: Any, first: GpmSample, second: GpmSample) -> Any:
    """Implements nvmlGpmMetricsGet.

    Writes the results into `request` (c_nvmlGpmMetricsGet_t) and returns it.
    """
    if second.gpu is None or (first.gpu, first.gi_id) != (second.gpu, second.gi_id):
        raise_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    for index in range(request.numMetrics):
        metric = request.metrics[index]
        value = _evaluate(metric.metricId, first, second)
        metric.nvmlReturn = _code_of(value)
        metric.value = value or 0.0
    return request


def _evaluate(metric: int, first: GpmSample, second: GpmSample) -> float | None:
    seconds = second.at - first.at
    if seconds <= 0:
        return None

    busy = (second.meter.busy - first.meter.busy) / seconds
    tensor = (second.meter.tensor - first.meter.tensor) / seconds
    dram = (second.meter.dram - first.meter.dram) / seconds

    nvlink = second.nvlinks * _NVLINK_BYTES
    # PCIe and NVLink, sent and received: bytes per second while the GPU is busy. 0 if the GPU has
    # no NVLink.
    rates = {20: _PCIE_TX_BYTES, 21: _PCIE_RX_BYTES, 60: nvlink, 61: nvlink}
    if metric in rates:
        rate = rates[metric]
        # In MiB/s.
        return busy * rate / MIB if rate else None

    if metric not in _PERCENT:
        return None
    of_busy, of_tensor, of_dram = _PERCENT[metric]
    ratio = of_busy * busy + of_tensor * tensor + of_dram * dram
    return min(100.0, max(0.0, 100.0 * ratio))
