"""Calls NVML, and reads the MIG instances, processes and fields of a device.

`metrics/fields.csv` defines the NVML call for each field. Fields with the same call are read
together.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import pynvml

from podgpu.errors import DeviceLost, DriverGone, SourceError, StartError, Unsupported
from podgpu.known import select_known
from podgpu.metrics.fields import Field, FieldValue, Gpm, NvmlCall
from podgpu.metrics.values import Blank, value_of
from podgpu.model import Device, ProcessUsage, Value, device_key
from podgpu.workers import DriverLock

Key = TypeVar("Key", bound=Hashable)
T = TypeVar("T")
_UNSUPPORTED = {
    pynvml.NVML_ERROR_NOT_SUPPORTED: "not_supported",
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: "not_supported",
    pynvml.NVML_ERROR_INVALID_ARGUMENT: "not_supported",  # for example, the GPU has no fan
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: "not_supported",
    pynvml.NVML_ERROR_DEPRECATED: "not_supported",
    pynvml.NVML_ERROR_NO_PERMISSION: "no_permission",
}
_LOST = {pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED}
_GONE = {
    pynvml.NVML_ERROR_UNINITIALIZED: (
        "driver_not_loaded",
        "the NVIDIA driver was unloaded while podgpu used it",
    ),
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: (
        "driver_not_loaded",
        "no NVIDIA driver is loaded on this node (check `nvidia-smi` on the host)",
    ),
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: (
        "library_not_found",
        "libnvidia-ml.so.1 was not found; in a container use the NVIDIA runtime with "
        "NVIDIA_DRIVER_CAPABILITIES=utility, or mount the driver's library directory",
    ),
}
_REASONS = {
    pynvml.NVML_ERROR_NOT_FOUND: "not_found",
    pynvml.NVML_ERROR_TIMEOUT: "timeout",
    pynvml.NVML_ERROR_NO_DATA: "no_data",
    pynvml.NVML_ERROR_NOT_READY: "not_ready",
    pynvml.NVML_ERROR_UNKNOWN: "unknown",
}
# Functions that fill a structure of the caller, and its type.
_OUT_STRUCTS = {
    "nvmlDeviceGetGpuFabricInfoV": "c_nvmlGpuFabricInfo_v3_t",
    "nvmlDeviceGetPlatformInfo": "c_nvmlPlatformInfo_v2_t",
    "nvmlDeviceGetSramEccErrorStatus": "c_nvmlEccSramErrorStatus_v1_t",
}
_NO_INSTANCE = 0xFFFFFFFF


class VersionMismatch(StartError):
    """libnvidia-ml and the kernel driver have different versions.

    The container must be recreated.
    """


class NvmlDriver:
    def __init__(self, nvml: Any) -> None:
        """Does not open the driver.

        `nvml`: the pynvml module, or an object with the same functions (see
        labs/simulate/simulated_driver.py).
        """
        self._nvml = nvml
        self._lock = DriverLock("the driver")
        self.hold = self._lock.hold
        """Context manager for calls. It prevents `close` from shutting NVML down during a call."""

    def open(self) -> None:
        """Initializes NVML, unless it is open. Raises DriverGone or VersionMismatch."""
        self._lock.open(partial(self.call, "nvmlInit"))

    def close(self, wait: float, free: Callable[[], None]) -> bool:
        """Calls `free`, then shuts NVML down.

        If another call does not return within `wait` seconds, leaves NVML open and returns False.
        """

        def stop() -> None:
            # The driver may already be unloaded.
            with suppress(SourceError, StartError):
                free()
            with suppress(SourceError, StartError):
                self.call("nvmlShutdown")

        return self._lock.close(wait, stop)

    def constant(self, name: str) -> Any:
        return getattr(self._nvml, name)

    def call(self, function: str, *arguments: Any, attempts: int = 4) -> Any:
        """Calls an NVML function.

        Retries if a list became longer after pynvml had read its length. Raises Unsupported,
        DeviceLost, DriverGone, VersionMismatch or SourceError.
        """
        try:
            return self._call(function, *arguments)
        except pynvml.NVMLError as e:
            if e.value == pynvml.NVML_ERROR_INSUFFICIENT_SIZE and attempts > 1:
                return self.call(function, *arguments, attempts=attempts - 1)
            raise translate(e.value, function) from e

    def _call(self, name: str, *arguments: Any) -> Any:
        function = getattr(self._nvml, name, None)
        if function is None:
            raise Unsupported(f"this nvidia-ml-py has no {name}; install a newer one")

        if name in _OUT_STRUCTS:
            struct = getattr(self._nvml, _OUT_STRUCTS[name])()
            function(*arguments, ctypes.byref(struct))
            return struct
        if name == "nvmlDeviceValidateInforom":
            return _is_inforom_valid(function, *arguments)
        return function(*arguments)


def _is_inforom_valid(validate: Callable[..., None], handle: Any) -> int:
    """Returns 1 or 0. NVML reports the result as an error instead of a value."""
    try:
        validate(handle)
    except pynvml.NVMLError as e:
        if e.value == pynvml.NVML_ERROR_CORRUPTED_INFOROM:
            return 0
        raise
    return 1


def translate(code: int, function: str) -> SourceError | StartError:
    """Converts NVML's return code to an exception. `function`: the NVML function that failed."""
    text = str(pynvml.NVMLError(code))
    if code in _UNSUPPORTED:
        return Unsupported(f"{function}: {text}", _UNSUPPORTED[code])
    if code in _LOST:
        return DeviceLost(f"{function}: {text}; reset the GPU or reboot the node (see dmesg)")
    if code in _GONE:
        reason, advice = _GONE[code]
        return DriverGone(advice, reason)
    if code == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return VersionMismatch(
            "libnvidia-ml in this container and the kernel driver have different versions "
            "(was the driver upgraded?); exiting, because this container must be recreated"
        )

    return SourceError(_REASONS.get(code, f"nvml_{code}"), f"{function}: {text}")


class CallGuard(Generic[Key]):
    """Collects the errors of one reading, so that a failed call affects only its own values.

    A value is identified by a `Key`: the id of a field, or the name of a function.
    """

    def __init__(self, unsupported: Iterable[Key] = ()) -> None:
        # Values that the GPU does not support. They are not read again.
        self.unsupported: set[Key] = set(unsupported)
        # Reasons of the calls that failed.
        self.errors: list[str] = []
        # Values that were invalid: special codes, NaN and impossible values.
        self.dropped: list[Key] = []

    def begin(self) -> None:
        """Clears the errors of the last reading."""
        self.errors.clear()
        self.dropped.clear()

    @contextmanager
    def catch(self, *keys: Key) -> Iterator[None]:
        """Records errors of the calls in the `with` block. These calls read the values `keys`.

        Re-raises DeviceLost and DriverGone.
        """
        try:
            yield
        except SourceError as e:
            self.add(e, keys)

    def attempt(self, key: Key, call: Callable[[], T]) -> T | None:
        """Returns the result of `call`. None if `key` is not supported, or if the call fails."""
        if key not in self.unsupported:
            with self.catch(key):
                return call()
        return None

    def is_valid(self, key: Key, value: float, most: float) -> bool:
        """Returns True if the value is between 0 and `most`. Otherwise records it as dropped."""
        if 0 <= value <= most:
            return True
        self.dropped.append(key)
        return False

    def add(self, error: SourceError, keys: Iterable[Key]) -> None:
        """Collects an error. `keys`: the values that could not be read.

        Raises it if it is DeviceLost or DriverGone.
        """
        if isinstance(error, DeviceLost | DriverGone):
            raise error
        if isinstance(error, Unsupported):
            self.unsupported.update(keys)
        else:
            self.errors.append(error.reason)


def handle_address(handle: Any) -> int | None:
    """Returns the address in a handle.

    Handles of the same GPU differ in pynvml, but have the same address.
    """
    return ctypes.cast(handle, ctypes.c_void_p).value


def parse_instance_id(gi_id: int) -> int | None:
    """Returns the GPU instance id, or None if NVML's value stands for the whole GPU."""
    if gi_id == _NO_INSTANCE:
        return None
    return gi_id


# Devices

# "NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb": the instance is 3g.20gb.
_PROFILE = re.compile(r"MIG (?:\d+c\.)?(\S+)")


@dataclass(frozen=True, slots=True)
class DeviceHandle:
    """A GPU or MIG instance with its NVML handle."""

    device: Device
    # For a MIG instance, the handle of any of its MIG devices. NVML then returns the memory of the
    # whole instance.
    handle: Any = field(compare=False, hash=False)


class GpuLayout(NamedTuple):
    gpu: DeviceHandle
    instances: tuple[DeviceHandle, ...] = ()  # MIG instances


def open_gpu(driver: NvmlDriver, index: int) -> DeviceHandle:
    """Returns the GPU with this index. Raises SourceError if it cannot be opened."""
    handle = driver.call("nvmlDeviceGetHandleByIndex", index)
    minor: int | None = None
    with suppress(Unsupported):
        minor = int(driver.call("nvmlDeviceGetMinorNumber", handle))

    device = Device(
        index=index,
        uuid=driver.call("nvmlDeviceGetUUID", handle),
        pci_bus_id=driver.call("nvmlDeviceGetPciInfo", handle).busId,
        model=driver.call("nvmlDeviceGetName", handle),
        minor=minor,
    )
    return DeviceHandle(device, handle)


def list_instances(driver: NvmlDriver, gpu: DeviceHandle) -> list[DeviceHandle]:
    """Returns the MIG instances of a GPU."""
    # An instance may have several MIG devices.
    by_instance: defaultdict[int, list[Any]] = defaultdict(list)
    for mig in _list_mig_devices(driver, gpu):
        by_instance[driver.call("nvmlDeviceGetGpuInstanceId", mig)].append(mig)

    instances = []
    for gi_id in sorted(by_instance):
        migs = by_instance[gi_id]
        profile = _parse_profile(driver.call("nvmlDeviceGetName", migs[0]))
        uuids = [driver.call("nvmlDeviceGetUUID", mig) for mig in migs]
        device = replace(gpu.device, gi_id=gi_id, profile=profile, mig_uuids=tuple(uuids))
        instances.append(DeviceHandle(device, migs[0]))
    return instances


def _list_mig_devices(driver: NvmlDriver, gpu: DeviceHandle) -> Iterator[Any]:
    for slot in range(driver.call("nvmlDeviceGetMaxMigDeviceCount", gpu.handle)):
        try:
            yield driver.call("nvmlDeviceGetMigDeviceHandleByIndex", gpu.handle, slot)
        except SourceError as e:
            # No MIG device has this index. Older drivers then return INVALID_ARGUMENT.
            if e.reason != "not_found" and not isinstance(e, Unsupported):
                raise


def _parse_profile(name: str) -> str:
    """Returns the profile in the name of a MIG device, or else the whole name."""
    match = _PROFILE.search(name)
    if match is None:
        return name
    return match[1]


# Processes

# Uses versioned names, because pynvml's unversioned functions raise other exceptions with older
# drivers.
_MPS_LIST = "nvmlDeviceGetMPSComputeRunningProcesses_v3"
_LISTS = (
    "nvmlDeviceGetComputeRunningProcesses_v3",
    _MPS_LIST,
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
)
_NOT_AVAILABLE = 0xFFFFFFFFFFFFFFFF
MAX_PID = 1 << 22
"""Linux's PID_MAX_LIMIT.

Larger pids are ignored, because they are uninitialized memory of the driver.
"""


def list_processes(driver: NvmlDriver, layout: GpuLayout) -> tuple[ProcessUsage, ...]:
    """Lists the processes on a GPU and its MIG instances. Raises Unsupported or SourceError."""
    gpu = layout.gpu
    targets = _list_targets(driver, layout)
    # Nothing can run in MIG mode without instances, and the GPU's own lists may be refused.
    if gpu.device.mig_enabled and len(targets) == 1:
        return ()

    usages = []
    refusals = []
    for function in _LISTS:
        for target, key in targets:
            try:
                entries = driver.call(function, target)
            except Unsupported as e:
                refusals.append(e)
                continue
            for entry in entries:
                if 0 < entry.pid <= MAX_PID:
                    mps = function == _MPS_LIST
                    usages.append(_parse_process(gpu.device.uuid, key, entry, mps=mps))
            # The GPU's list, visible with privileges, already contains the processes of its MIG
            # devices.
            if entries and target is gpu.handle:
                break

    if len(refusals) == len(_LISTS) * len(targets):
        raise Unsupported(f"NVML lists no processes on {gpu.device.uuid}", refusals[0].reason)
    return _deduplicate(usages)


def _list_targets(driver: NvmlDriver, layout: GpuLayout) -> list[tuple[Any, str]]:
    """Returns handle and device key of the GPU, and of each of its MIG devices."""
    gpu = layout.gpu
    targets = [(gpu.handle, gpu.device.uuid)]
    for instance in layout.instances:
        for uuid in instance.device.mig_uuids:
            handle = driver.call("nvmlDeviceGetHandleByUUID", uuid)
            targets.append((handle, instance.device.key))
    return targets


def _parse_process(gpu_uuid: str, list_key: str, entry: Any, *, mps: bool) -> ProcessUsage:
    """Parses an entry of the list of the device `list_key`.

    In MIG mode, entries of the GPU's list name their instance.
    """
    gi_id = parse_instance_id(entry.gpuInstanceId)
    key = list_key
    if gi_id is not None:
        key = device_key(gpu_uuid, gi_id)

    memory = None if entry.usedGpuMemory == _NOT_AVAILABLE else entry.usedGpuMemory
    return ProcessUsage(key, entry.pid, memory, mps)


def _deduplicate(usages: Iterable[ProcessUsage]) -> tuple[ProcessUsage, ...]:
    """Merges entries of the same process, which can be in two lists.

    Each entry has the memory of the whole process.
    """
    merged: dict[tuple[str, int], ProcessUsage] = {}
    for usage in usages:
        key = usage.device, usage.pid
        first = merged.get(key)
        if first is None:
            merged[key] = usage
            continue
        memories = select_known([first.memory, usage.memory])
        mps = first.mps or usage.mps
        merged[key] = replace(first, memory=max(memories, default=None), mps=mps)
    return tuple(merged[key] for key in sorted(merged))


# Fields

# Member of the union `nvmlValue_t` by NVML's value type.
_VALUE_MEMBERS = dict(enumerate(("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")))
ENERGY_COUNTER = "nvmlDeviceGetTotalEnergyConsumption"
MIN_GPM_SECONDS = 0.1  # minimum time between two GPM samples that NVML allows


class FirmwarePhase:
    """Reads the energy counter at times when the GPU's firmware is not busy.

    Every 100 ms, the firmware of an H200 is busy for 12 ms. A reading at that time spins in the
    driver, and costs up to 15 ms of CPU instead of 3. An interval of 1 s keeps the phase, so an
    unlucky start would affect every reading. So this class knows what readings cost with eight
    delays. After an expensive reading, it uses the cheapest delay.
    """

    DELAYS = tuple(number * 0.0125 for number in range(8))  # seconds
    SPIN = 0.004  # CPU seconds by which an expensive reading exceeds a cheap one

    def __init__(
        self,
        cpu: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._cpu = cpu
        self._sleep = sleep

        # CPU seconds of the last reading with each delay. 0 before the first, so each is tried.
        self._costs = [0.0] * len(self.DELAYS)
        self._choice = 0  # index of the delay

    @contextmanager
    def avoid_busy_firmware(self) -> Iterator[None]:
        """Waits, then measures the CPU time of the enclosed reading."""
        self._sleep(self.DELAYS[self._choice])
        before = self._cpu()
        yield
        cost = self._cpu() - before
        self._costs[self._choice] = cost

        least = min(self._costs)
        if cost > least + self.SPIN:
            self._choice = self._costs.index(least)


@dataclass(eq=False)
class GpmSampler:
    """Reads profiling metrics (GPM) of a GPU or MIG instance as means between two samples.

    Needs Hopper or later.
    """

    _driver: NvmlDriver
    _gpu: Any  # handle of the physical GPU
    _gi_id: int | None  # None for the whole GPU
    # The two memory areas for the last sample and the next one.
    _samples: list[Any] = field(default_factory=list)
    last_at: float | None = None  # time of the last sample; None before the first

    def read(self, metrics: Sequence[int], now: float) -> dict[int, tuple[int, float]]:
        """Returns NVML's return code and the mean since the last call, for each metric.

        The unit is percent or MiB/s. Returns an empty dict on the first call, and if the last call
        was too recent.
        """
        if self.last_at is not None and now - self.last_at < MIN_GPM_SECONDS:
            return {}

        while len(self._samples) < 2:
            self._samples.append(self._driver.call("nvmlGpmSampleAlloc"))

        older, newer = self._samples
        if self._gi_id is None:
            self._driver.call("nvmlGpmSampleGet", self._gpu, newer)
        else:
            self._driver.call("nvmlGpmMigSampleGet", self._gpu, self._gi_id, newer)
        means = {}
        if self.last_at is not None:
            means = self._compute_means(older, newer, metrics)

        self._samples = [newer, older]
        self.last_at = now
        return means

    def _compute_means(
        self, older: Any, newer: Any, metrics: Sequence[int]
    ) -> dict[int, tuple[int, float]]:
        request = self._driver.constant("c_nvmlGpmMetricsGet_t")()
        request.version = self._driver.constant("NVML_GPM_METRICS_GET_VERSION")
        request.numMetrics = len(metrics)
        request.sample1 = older
        request.sample2 = newer

        for i, metric in enumerate(metrics):
            request.metrics[i].metricId = metric
        self._driver.call("nvmlGpmMetricsGet", request)

        entries = request.metrics[: len(metrics)]
        return {entry.metricId: (entry.nvmlReturn, entry.value) for entry in entries}

    def close(self) -> None:
        for sample in self._samples:
            with suppress(SourceError):
                self._driver.call("nvmlGpmSampleFree", sample)
        self._samples = []
        self.last_at = None


@dataclass(eq=False)
class DevicePlan:
    """Reads some fields of one GPU or MIG device. Does not read unsupported fields again."""

    _driver: NvmlDriver
    _handle: Any
    gpm: GpmSampler
    _fields: Sequence[Field]
    _values: dict[int, Value] = field(default_factory=dict)  # of the current reading, by field id
    _constants: dict[int, Value] = field(default_factory=dict)  # see `Field.once`
    # Fields to read and their recipes, grouped by NVML call.
    _groups: dict[object, list[tuple[Field, Any]]] = field(default_factory=dict)
    # Numbers of unsupported and of constant fields when `_groups` was built. None before.
    _numbers_when_grouped: tuple[int, int] | None = None
    # Time and value of the last reading by field id, used to compute rates.
    _totals: dict[int, tuple[float, float]] = field(default_factory=dict)
    _phase: FirmwarePhase = field(default_factory=FirmwarePhase)

    def __post_init__(self) -> None:
        self.guard = CallGuard(wanted.id for wanted in self._fields if wanted.recipe is None)

    def read(self, now: float) -> dict[int, Value]:
        """Returns values by field id.

        Raises DeviceLost or DriverGone. Other errors are recorded in `guard`.
        """
        self.guard.begin()
        self._values = dict(self._constants)
        # These sets only grow, so their numbers show whether there is less to read.
        numbers = len(self.guard.unsupported), len(self._constants)
        if numbers != self._numbers_when_grouped:
            self._numbers_when_grouped = numbers
            self._groups = self._group_fields()

        for group in self._groups.values():
            _, recipe = group[0]
            try:
                match recipe:
                    case NvmlCall():
                        self._read_call(recipe, group)
                    case FieldValue():
                        self._read_field_values(group, now)
                    case Gpm():
                        self._read_gpm(group, now)
            except SourceError as e:
                self.guard.add(e, [wanted.id for wanted, _ in group])
        return self._values

    def _group_fields(self) -> dict[object, list[tuple[Field, Any]]]:
        groups: dict[object, list[tuple[Field, Any]]] = {}
        for wanted in self._fields:
            if wanted.id in self.guard.unsupported or wanted.id in self._constants:
                continue

            recipe = wanted.recipe
            # One call returns all field values, and one all GPM metrics.
            key: object = type(recipe)
            if isinstance(recipe, NvmlCall):
                key = recipe.function, recipe.arguments
            groups.setdefault(key, []).append((wanted, recipe))
        return groups

    def _accept(self, wanted: Field, raw: Any) -> None:
        try:
            value = value_of(wanted, raw)
        except Blank:
            self.guard.dropped.append(wanted.id)
            return
        self._values[wanted.id] = value
        if wanted.once:
            self._constants[wanted.id] = value

    def _read_call(self, call: NvmlCall, group: list[tuple[Field, NvmlCall]]) -> None:
        arguments = self._make_arguments(call)
        phase: AbstractContextManager[None] = nullcontext()
        if call.function == ENERGY_COUNTER:
            phase = self._phase.avoid_busy_firmware()
        with phase:
            answer = self._driver.call(call.function, *arguments)

        for wanted, recipe in group:
            try:
                value = getattr(answer, recipe.member) if recipe.member else answer
            except AttributeError:
                # Older drivers return a smaller structure.
                self.guard.unsupported.add(wanted.id)
                continue
            if recipe.element is not None:
                value = value[recipe.element]
            self._accept(wanted, value)

    def _make_arguments(self, call: NvmlCall) -> list[Any]:
        arguments: list[Any] = []
        if call.takes_device:
            arguments.append(self._handle)
        for argument in call.arguments:
            # Texts are names of NVML's constants.
            if isinstance(argument, str):
                argument = self._driver.constant(argument)
            arguments.append(argument)
        return arguments

    def _read_field_values(self, group: list[tuple[Field, FieldValue]], now: float) -> None:
        requests: set[tuple[int, int]] = set()  # id and scope of NVML's field values
        for _, recipe in group:
            for value_id in recipe.ids:
                requests.add((value_id, recipe.scope))

        batch = sorted(requests)
        answer = self._driver.call("nvmlDeviceGetFieldValues", self._handle, batch)
        entries = dict(zip(batch, answer, strict=True))

        for wanted, recipe in group:
            with self.guard.catch(wanted.id):
                parts = [_decode_field_value(entries[i, recipe.scope]) for i in recipe.ids]
                total = sum(parts)
                value = self._compute_rate(wanted.id, total, now) if wanted.is_rate else total
                if value is not None:
                    self._accept(wanted, value)

    def _compute_rate(self, field_id: int, total: float, now: float) -> float | None:
        """Returns the counter's increase per second.

        Returns None for the first reading and after a reset.
        """
        time_before, total_before = self._totals.get(field_id, (now, total))
        self._totals[field_id] = now, total

        if now <= time_before or total < total_before:
            return None
        return (total - total_before) / (now - time_before)

    def _read_gpm(self, group: list[tuple[Field, Gpm]], now: float) -> None:
        means = self.gpm.read([recipe.metric for _, recipe in group], now)
        # There is no mean yet, or not again.
        if not means:
            return

        for wanted, recipe in group:
            code, mean = means[recipe.metric]
            with self.guard.catch(wanted.id):
                if code:
                    raise translate(code, "nvmlGpmMetricsGet")
                self._accept(wanted, mean)


def _decode_field_value(entry: Any) -> Any:
    if entry.nvmlReturn:
        raise translate(entry.nvmlReturn, f"NVML field {entry.fieldId}")
    member = _VALUE_MEMBERS.get(entry.valueType)
    if member is None:
        raise SourceError(
            "bad_answer", f"NVML field {entry.fieldId} has the unknown value type {entry.valueType}"
        )
    return getattr(entry.value, member)
