"""This module knows what nvmlDeviceGet... answers on simulated devices: one table for GPUs, one for MIG devices.

A function that is in neither is not supported on that kind of device. Answers have the types pynvml gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn

import pynvml

from podgpu.simulate.gpu import FULL_CELSIUS, IDLE_CELSIUS, PCIE_RX_BYTES, PCIE_TX_BYTES, MigInstance, SimulatedGpu
from podgpu.simulate.models import AMPERE, MIB
from podgpu.simulate.workload import SimulatedLoad

NO_INSTANCE = 0xFFFFFFFF
_SAMPLING_PERIOD_US = 100_000
_MAX_CELSIUS = 87


def refuse(code: int) -> NoReturn:
    """Raises; an expression, so that tables of lambdas can use it."""
    raise pynvml.NVMLError(code)


def _not_supported() -> NoReturn:
    refuse(pynvml.NVML_ERROR_NOT_SUPPORTED)


def _fill(struct: Any, **members: Any) -> Any:
    for name, value in members.items():
        setattr(struct, name, value)
    return struct


def pci_bus(gpu: SimulatedGpu) -> int:
    return 4 + 2 * gpu.number


def pci_bus_id(gpu: SimulatedGpu) -> str:
    return f"00000000:{pci_bus(gpu):02X}:00.0"


def _pci_info(gpu: SimulatedGpu) -> Any:
    bus_id = pci_bus_id(gpu)
    return _fill(
        pynvml.nvmlPciInfo_t(),
        busIdLegacy=bus_id[4:],
        busId=bus_id,
        bus=pci_bus(gpu),
        pciDeviceId=gpu.model.pci_device,
        pciSubSystemId=0x18BF10DE,
    )


def _memory(total: int, reserved: int, used: int, version: int | None) -> Any:
    free = total - reserved - used
    if version is None:
        # The first version has no word for reserved memory and calls it used.
        return _fill(pynvml.c_nvmlMemory_t(), total=total, free=free, used=used + reserved)
    struct = pynvml.c_nvmlMemory_v2_t()
    return _fill(struct, version=version, total=total, reserved=reserved, free=free, used=used)


def _gpu_memory(gpu: SimulatedGpu, version: int | None = None) -> Any:
    return _memory(gpu.model.memory, gpu.model.reserved, gpu.memory_used(), version)


def _mig_memory(gpu: SimulatedGpu, instance: MigInstance, version: int | None = None) -> Any:
    total = instance.profile.memory_mib * MIB
    return _memory(total, instance.reserved, gpu.memory_used(instance.gi_id), version)


def _bar1(total: int, processes: int) -> Any:
    used = min(total, (1 + 2 * processes) * MIB)
    return _fill(pynvml.c_nvmlBAR1Memory_t(), bar1Total=total, bar1Used=used, bar1Free=total - used)


def _mig_bar1(gpu: SimulatedGpu, instance: MigInstance) -> Any:
    total = gpu.model.bar1 * instance.profile.memory_slices // gpu.model.memory_slices
    return _bar1(total, len(gpu.running(instance.gi_id)))


def _mig_attributes(gpu: SimulatedGpu, instance: MigInstance) -> Any:
    slices = instance.profile.compute_slices
    return _fill(
        pynvml.c_nvmlDeviceAttributes(),
        multiprocessorCount=gpu.model.multiprocessors * slices // gpu.model.compute_slices,
        sharedCopyEngineCount=slices,
        sharedDecoderCount=slices // 2,
        gpuInstanceSliceCount=slices,
        computeInstanceSliceCount=slices,
        memorySizeMB=instance.profile.memory_mib,
    )


def _utilisation(gpu: SimulatedGpu) -> Any:
    if gpu.mig_enabled:
        _not_supported()
    busy = gpu.activity.device
    return _fill(pynvml.c_nvmlUtilization_t(), gpu=round(100 * busy.busy), memory=round(100 * busy.dram))


def _engine(part_of: Callable[[SimulatedLoad], float]) -> Callable[[SimulatedGpu], Any]:
    """Utilisation of an encoder or decoder engine; like the other rates it is not given while MIG is on."""

    def read(gpu: SimulatedGpu) -> Any:
        if gpu.mig_enabled:
            _not_supported()
        return [min(100, round(100 * sum(map(part_of, gpu.running())))), _SAMPLING_PERIOD_US]

    return read


def _clock(clocks: tuple[int, int, int], kind: int) -> Any:
    """Graphics and SM clocks are one."""
    return (clocks[0], *clocks)[kind] if 0 <= kind < 4 else refuse(pynvml.NVML_ERROR_INVALID_ARGUMENT)


def _max_clocks(gpu: SimulatedGpu) -> tuple[int, int, int]:
    model = gpu.model
    return model.sm_clock[1], model.memory_clock[1], model.video_clock[1]


def _application_clock(gpu: SimulatedGpu, kind: int) -> Any:
    return _clock(_max_clocks(gpu), kind) if gpu.model.application_clocks and kind != 3 else _not_supported()


def _event_reasons(gpu: SimulatedGpu) -> Any:
    if gpu.activity.device.busy == 0:
        return pynvml.nvmlClocksEventReasonGpuIdle
    return pynvml.nvmlClocksEventReasonSwPowerCap if gpu.activity.capped else 0


def _threshold(gpu: SimulatedGpu, which: int) -> Any:
    if which == pynvml.NVML_TEMPERATURE_THRESHOLD_MEM_MAX and not gpu.model.hbm:
        _not_supported()
    offsets = {0: 8, 1: 2, 2: 8, 3: 0}
    return _MAX_CELSIUS + offsets[which] if which in offsets else _not_supported()


def _error_counter(gpu: SimulatedGpu, error: int, counter: int, location: int) -> Any:
    """Ampere and later tell DRAM (2) from SRAM (7) only; older parts name the caches (0 to 6)."""
    known = (2, 7) if gpu.model.architecture >= AMPERE else range(7)
    return 0 if gpu.model.ecc and location in known else _not_supported()


def _histogram(gpu: SimulatedGpu) -> Any:
    if not gpu.model.row_remapping:
        _not_supported()
    return _fill(pynvml.c_nvmlRowRemapperHistogramValues(), max=3072 if gpu.model.hbm else 192)


def _fan(gpu: SimulatedGpu) -> Any:
    if not gpu.model.fan:
        _not_supported()
    return round(30 + 60 * max(0.0, gpu.celsius - IDLE_CELSIUS) / (FULL_CELSIUS - IDLE_CELSIUS))


def _inforom(gpu: SimulatedGpu, which: int) -> Any:
    versions = {pynvml.NVML_INFOROM_OEM: "2.1"} | ({pynvml.NVML_INFOROM_ECC: "7.16"} if gpu.model.ecc else {})
    return versions[which] if which in versions else _not_supported()


def _violation(gpu: SimulatedGpu, policy: int) -> Any:
    power = policy == pynvml.NVML_PERF_POLICY_POWER
    return _fill(
        pynvml.c_nvmlViolationTime_t(),
        referenceTime=gpu.wall_us,
        violationTime=int(gpu.capped_seconds * 1e9) if power else 0,
    )


def _affinity(words: int, first: int) -> Any:
    return (pynvml.c_ulonglong * words)(*([first] if words else []))


def list_processes(loads: Iterable[SimulatedLoad], kind: str) -> list[Any]:
    """As pynvml lists them: plain objects, with the instance when MIG is on."""
    return [
        pynvml.nvmlFriendlyObject(
            {
                "pid": load.pid,
                "usedGpuMemory": load.memory,
                "gpuInstanceId": NO_INSTANCE if load.gi_id is None else load.gi_id,
                "computeInstanceId": NO_INSTANCE if load.gi_id is None else 0,
            }
        )
        for load in loads
        if load.kind == kind
    ]


def _samples(gpu: SimulatedGpu, kind: int, since_us: int) -> Any:
    """Value type and samples. Only utilisation is simulated; other kinds have their own calls."""
    if gpu.mig_enabled or kind != pynvml.NVML_GPU_UTILIZATION_SAMPLES:
        _not_supported()
    samples = []
    for seen in gpu.samples(since_us):
        sample = _fill(pynvml.c_nvmlSample_t(), timeStamp=seen.wall_us)
        sample.sampleValue.uiVal = round(100 * seen.busy)
        samples.append(sample)
    return (pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, samples) if samples else refuse(pynvml.NVML_ERROR_NOT_FOUND)


def _process_utilisation(kind: type[Any], gpu: SimulatedGpu, since_us: int) -> Any:
    """The old call and the new one tell the same, in structures of their own."""
    if gpu.mig_enabled:
        _not_supported()
    entries = [
        _fill(
            kind(),
            pid=mean.pid,
            timeStamp=mean.last_ran_us,
            smUtil=round(100 * mean.sm),
            memUtil=round(100 * mean.dram),
            encUtil=round(100 * mean.encoder),
            decUtil=round(100 * mean.decoder),
        )
        for mean in gpu.process_means(since_us)
    ]
    return entries or refuse(pynvml.NVML_ERROR_NOT_FOUND)


def _where(has: Callable[[SimulatedGpu], bool], read: Callable[..., Any]) -> Callable[..., Any]:
    return lambda gpu, *arguments: read(gpu, *arguments) if has(gpu) else _not_supported()


_ECC: Callable[[SimulatedGpu], bool] = lambda gpu: gpu.model.ecc  # noqa: E731
_LIMIT: Callable[[SimulatedGpu], int] = lambda gpu: gpu.model.power[2] * 1000  # noqa: E731

GPU_CALLS: dict[str, Callable[..., Any]] = {
    "nvmlDeviceGetName": lambda gpu: gpu.model.name,
    "nvmlDeviceGetUUID": lambda gpu: gpu.uuid,
    "nvmlDeviceGetPciInfo": _pci_info,
    "nvmlDeviceGetPciInfo_v3": _pci_info,
    "nvmlDeviceGetMinorNumber": lambda gpu: gpu.minor,
    "nvmlDeviceGetSerial": lambda gpu: f"16500{gpu.seed % 10_000:04d}{gpu.number:04d}",
    "nvmlDeviceGetBrand": lambda gpu: gpu.model.brand,
    "nvmlDeviceGetArchitecture": lambda gpu: gpu.model.architecture,
    "nvmlDeviceGetCudaComputeCapability": lambda gpu: gpu.model.compute_capability,
    "nvmlDeviceGetVbiosVersion": lambda gpu: f"{gpu.model.pci_device >> 24:02X}.00.A5.00.1A",
    "nvmlDeviceGetInforomImageVersion": lambda gpu: "G520.0282.02.02",
    "nvmlDeviceGetInforomVersion": _inforom,
    "nvmlDeviceGetInforomConfigurationChecksum": lambda gpu: 0,
    "nvmlDeviceValidateInforom": lambda gpu: None,
    "nvmlDeviceGetNumGpuCores": lambda gpu: 128 * gpu.model.multiprocessors,
    "nvmlDeviceGetCpuAffinity": lambda gpu, words: _affinity(words, 0xFFFFFFFF),
    "nvmlDeviceGetMemoryAffinity": lambda gpu, words, scope: _affinity(words, 1),
    "nvmlDeviceGetMigMode": _where(lambda gpu: bool(gpu.model.profiles), lambda gpu: [int(gpu.mig_enabled)] * 2),
    "nvmlDeviceGetMaxMigDeviceCount": lambda gpu: gpu.model.compute_slices if gpu.mig_enabled else 0,
    "nvmlDeviceGetMemoryInfo": _gpu_memory,
    "nvmlDeviceGetBAR1MemoryInfo": lambda gpu: _bar1(gpu.model.bar1, len(gpu.loads)),
    "nvmlDeviceGetUtilizationRates": _utilisation,
    "nvmlDeviceGetEncoderUtilization": _engine(lambda load: load.encoder),
    "nvmlDeviceGetDecoderUtilization": _engine(lambda load: load.decoder),
    "nvmlDeviceGetJpgUtilization": _engine(lambda load: 0.0),
    "nvmlDeviceGetOfaUtilization": _engine(lambda load: 0.0),
    "nvmlDeviceGetPowerUsage": lambda gpu: gpu.milliwatts,
    "nvmlDeviceGetEnforcedPowerLimit": _LIMIT,
    "nvmlDeviceGetPowerManagementLimit": _LIMIT,
    "nvmlDeviceGetPowerManagementDefaultLimit": _LIMIT,
    "nvmlDeviceGetPowerManagementLimitConstraints": lambda gpu: [gpu.model.power[1] * 1000, _LIMIT(gpu)],
    "nvmlDeviceGetPowerManagementMode": lambda gpu: 1,
    "nvmlDeviceGetTotalEnergyConsumption": lambda gpu: gpu.energy_mj,
    "nvmlDeviceGetClockInfo": lambda gpu, kind: _clock(gpu.clocks, kind),
    "nvmlDeviceGetMaxClockInfo": lambda gpu, kind: _clock(_max_clocks(gpu), kind),
    "nvmlDeviceGetApplicationsClock": _application_clock,
    "nvmlDeviceGetDefaultApplicationsClock": _application_clock,
    "nvmlDeviceGetCurrentClocksEventReasons": _event_reasons,
    "nvmlDeviceGetCurrentClocksThrottleReasons": _event_reasons,
    "nvmlDeviceGetSupportedClocksEventReasons": lambda gpu: 511,
    "nvmlDeviceGetSupportedClocksThrottleReasons": lambda gpu: 511,
    "nvmlDeviceGetViolationStatus": _violation,
    "nvmlDeviceGetPerformanceState": lambda gpu: 0 if gpu.activity.device.busy else gpu.model.idle_pstate,
    "nvmlDeviceGetTemperature": lambda gpu, sensor: (
        round(gpu.celsius) if sensor == 0 else refuse(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    ),
    "nvmlDeviceGetTemperatureThreshold": _threshold,
    "nvmlDeviceGetMarginTemperature": _where(
        lambda gpu: gpu.model.margin_temperature, lambda gpu: _MAX_CELSIUS - round(gpu.celsius)
    ),
    "nvmlDeviceGetFanSpeed": _fan,
    "nvmlDeviceGetNumFans": lambda gpu: int(gpu.model.fan),
    "nvmlDeviceGetEccMode": _where(_ECC, lambda gpu: [1, 1]),
    "nvmlDeviceGetTotalEccErrors": _where(_ECC, lambda gpu, error, counter: 0),
    "nvmlDeviceGetMemoryErrorCounter": _error_counter,
    "nvmlDeviceGetRemappedRows": _where(lambda gpu: gpu.model.row_remapping, lambda gpu: (0, 0, 0, 0)),
    "nvmlDeviceGetRowRemapperHistogram": _histogram,
    "nvmlDeviceGetRetiredPages": _where(lambda gpu: gpu.model.page_retirement, lambda gpu, cause: []),
    "nvmlDeviceGetRetiredPagesPendingStatus": _where(lambda gpu: gpu.model.page_retirement, lambda gpu: 0),
    "nvmlDeviceGetUnrepairableMemoryFlag_v1": _where(_ECC, lambda gpu: 0),
    "nvmlDeviceGetCurrPcieLinkGeneration": lambda gpu: gpu.model.pcie_generation,
    "nvmlDeviceGetMaxPcieLinkGeneration": lambda gpu: gpu.model.pcie_generation,
    "nvmlDeviceGetCurrPcieLinkWidth": lambda gpu: 16,
    "nvmlDeviceGetMaxPcieLinkWidth": lambda gpu: 16,
    "nvmlDeviceGetPcieReplayCounter": lambda gpu: 0,
    "nvmlDeviceGetPcieThroughput": lambda gpu, counter: (
        int(gpu.activity.device.busy * (PCIE_RX_BYTES if counter else PCIE_TX_BYTES)) // 1024
    ),
    "nvmlDeviceGetPersistenceMode": lambda gpu: 1,
    "nvmlDeviceGetComputeMode": lambda gpu: 0,
    "nvmlDeviceGetVirtualizationMode": lambda gpu: 0,
    "nvmlDeviceGetGridLicensableFeatures": lambda gpu: pynvml.c_nvmlGridLicensableFeatures_v4_t(),
    "nvmlDeviceGetGridLicensableFeatures_v4": lambda gpu: pynvml.c_nvmlGridLicensableFeatures_v4_t(),
    "nvmlDeviceGetNvLinkErrorCounter": lambda gpu, link, counter: 0 if link < gpu.nvlinks else _not_supported(),
    "nvmlDeviceGetSupportedEventTypes": lambda gpu: 0xFF9F,
    "nvmlDeviceGetSamples": _samples,
    "nvmlDeviceGetProcessUtilization": partial(_process_utilisation, pynvml.c_nvmlProcessUtilizationSample_t),
    "nvmlDeviceGetProcessesUtilizationInfo": partial(_process_utilisation, pynvml.c_nvmlProcessUtilizationInfo_v1_t),
    "nvmlDeviceIsMigDeviceHandle": lambda gpu: pynvml.c_uint(0),
    # What a MIG device has and a GPU has not: the real driver blames the argument, except for the attributes.
    "nvmlDeviceGetGpuInstanceId": lambda gpu: refuse(pynvml.NVML_ERROR_INVALID_ARGUMENT),
    "nvmlDeviceGetComputeInstanceId": lambda gpu: refuse(pynvml.NVML_ERROR_INVALID_ARGUMENT),
    "nvmlGpmQueryDeviceSupport": lambda gpu: _fill(
        pynvml.c_nvmlGpmSupport_t(), version=1, isSupportedDevice=int(gpu.model.gpm)
    ),
}

MIG_CALLS: dict[str, Callable[..., Any]] = {
    "nvmlDeviceGetName": lambda gpu, instance: f"{gpu.model.name} MIG {instance.profile.name}",
    "nvmlDeviceGetUUID": lambda gpu, instance: instance.uuid,
    "nvmlDeviceGetGpuInstanceId": lambda gpu, instance: instance.gi_id,
    "nvmlDeviceGetComputeInstanceId": lambda gpu, instance: instance.ci_id,
    "nvmlDeviceGetMemoryInfo": _mig_memory,
    "nvmlDeviceGetBAR1MemoryInfo": _mig_bar1,
    "nvmlDeviceGetAttributes": _mig_attributes,
    "nvmlDeviceGetAttributes_v2": _mig_attributes,
    "nvmlDeviceIsMigDeviceHandle": lambda gpu, instance: pynvml.c_uint(1),
    "nvmlDeviceGetMaxMigDeviceCount": lambda gpu, instance: 0,
}
