"""Reads the fields of one device: executes the recipes of `metrics/fields.csv` with as few NVML calls as possible."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from podgpu.errors import DeviceLost, DriverGone, SourceError, Unsupported
from podgpu.gpu.nvml.driver import NvmlDriver, translate
from podgpu.metrics.fields import Blank, Field, FieldValue, Gpm, NvmlCall, Recorded, value_of
from podgpu.model import Value

_MEMORY_TEMP = 82  # r545 reports a wrong value type for it; it is always an unsigned int
_VALUE_MEMBERS = dict(enumerate(("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")))
ENERGY = "nvmlDeviceGetTotalEnergyConsumption"
MIN_GPM_SECONDS = 0.1
"""NVML requires at least 100 ms between two GPM samples."""


class GpmSampler:
    """Reads the profiling metrics (GPM) of one GPU or GPU instance as means between two samples. Hopper and later."""

    def __init__(self, driver: NvmlDriver, take_sample: Callable[[Any], None]) -> None:
        self._driver = driver
        self._take_sample = take_sample
        self._samples: list[Any] = []
        self._last_at: float | None = None

    def read(self, metrics: Iterable[int], now: float) -> dict[int, tuple[int, float]]:
        """Returns (NVML return code, percent or MiB/s) per metric, as means since the last call.

        Returns nothing in the first call.
        """
        if self._last_at is not None and now - self._last_at < MIN_GPM_SECONDS:
            return {}
        while len(self._samples) < 2:
            self._samples.append(self._driver.call("nvmlGpmSampleAlloc"))
        older, newer = self._samples
        self._take_sample(newer)
        values = {} if self._last_at is None else self._compute(older, newer, list(metrics))
        self._samples = [newer, older]
        self._last_at = now
        return values

    def _compute(self, older: Any, newer: Any, metrics: list[int]) -> dict[int, tuple[int, float]]:
        request = self._driver.constant("c_nvmlGpmMetricsGet_t")()
        request.version = self._driver.constant("NVML_GPM_METRICS_GET_VERSION")
        request.numMetrics = len(metrics)
        request.sample1, request.sample2 = older, newer
        for i, metric in enumerate(metrics):
            request.metrics[i].metricId = metric
        self._driver.call("nvmlGpmMetricsGet", request)
        entries = (request.metrics[i] for i in range(len(metrics)))
        return {entry.metricId: (entry.nvmlReturn, entry.value) for entry in entries}

    def close(self) -> None:
        for sample in self._samples:
            with suppress(SourceError):
                self._driver.call("nvmlGpmSampleFree", sample)
        self._samples, self._last_at = [], None


class EnergyCounter:
    """The energy counter of one GPU, shared by telemetry and usage. A reading costs 4.5 ms of CPU (H200)."""

    def __init__(self, driver: NvmlDriver, handle: Any, clock: Callable[[], float]) -> None:
        self._driver = driver
        self._handle = handle
        self._clock = clock
        self._last: tuple[float, Any] | None = None

    def read(self, max_age: float = 0.0) -> tuple[float, Any]:
        """Returns time and value of a reading that is less than `max_age` seconds old. Raises SourceError."""
        last, now = self._last, self._clock()
        if last is None or now - last[0] >= max_age:
            last = self._last = now, self._driver.call(ENERGY, self._handle)
        return last


class DevicePlan:
    """Reads a set of fields of one GPU or MIG device. Fields that are not supported are not read again."""

    def __init__(
        self,
        driver: NvmlDriver,
        handle: Any,
        take_gpm_sample: Callable[[Any], None],
        fields: Iterable[Field],
        energy: EnergyCounter | None = None,
    ) -> None:
        self._driver = driver
        self._handle = handle
        self._energy = energy
        self._gpm = GpmSampler(driver, take_gpm_sample)
        self._fields = {field.id: field for field in fields}
        self._once: dict[int, Value] = {}
        self._totals: dict[int, tuple[float, float]] = {}
        self.unsupported: set[int] = {f.id for f in self._fields.values() if f.recipe is None}
        self.dropped: list[int] = []
        self.errors: list[str] = []
        self._compile()

    def _compile(self) -> None:
        self._calls: dict[tuple[str, tuple[int | str, ...]], list[tuple[Field, NvmlCall]]] = {}
        self._field_values: list[tuple[Field, FieldValue]] = []
        self._metrics: list[tuple[Field, Gpm]] = []
        for field in self._fields.values():
            if field.id in self.unsupported or isinstance(field.recipe, Recorded):
                continue
            match field.recipe:
                case NvmlCall() as call if field.id not in self._once:
                    self._calls.setdefault((call.function, call.arguments), []).append((field, call))
                case FieldValue() as value:
                    self._field_values.append((field, value))
                case Gpm() as gpm:
                    self._metrics.append((field, gpm))
        self._batch = sorted({(i, value.scope) for _, value in self._field_values for i in value.ids})

    def read(self, now: float) -> dict[int, Value]:
        """Returns values by field id. Raises DeviceLost or DriverGone; other errors affect only their fields."""
        self.dropped.clear()
        self.errors.clear()
        finished = len(self.unsupported) + len(self._once)
        values: dict[int, Value] = dict(self._once)
        for users in self._calls.values():
            with self._catch_errors([f for f, _ in users]):
                self._read_call(values, users)
        if self._batch:
            with self._catch_errors([f for f, _ in self._field_values]):
                self._read_batch(values, now)
        if self._metrics:
            with self._catch_errors([f for f, _ in self._metrics]):
                self._read_gpm(values, now)
        if len(self.unsupported) + len(self._once) != finished:
            self._compile()
        return values

    def close(self) -> None:
        self._gpm.close()

    @contextmanager
    def _catch_errors(self, fields: Sequence[Field]) -> Iterator[None]:
        try:
            yield
        except Unsupported:
            self.unsupported.update(f.id for f in fields)
        except (DeviceLost, DriverGone):
            raise
        except SourceError as e:
            self.errors.append(e.reason)

    def _accept(self, values: dict[int, Value], field: Field, raw: Any) -> None:
        try:
            values[field.id] = value_of(field, raw)
        except Blank:
            self.dropped.append(field.id)
            return
        if field.once:
            self._once[field.id] = values[field.id]

    def _read_call(self, values: dict[int, Value], users: list[tuple[Field, NvmlCall]]) -> None:
        call = users[0][1]
        arguments = [self._driver.constant(a) if isinstance(a, str) else a for a in call.arguments]
        if call.takes_device:
            arguments.insert(0, self._handle)
        if self._energy is not None and call.function == ENERGY:
            _, answer = self._energy.read()
        else:
            answer = self._driver.call(call.function, *arguments)
        for field, recipe in users:
            try:
                self._accept(values, field, _select(answer, recipe))
            except AttributeError:
                self.unsupported.add(field.id)  # an older driver's smaller structure

    def _read_batch(self, values: dict[int, Value], now: float) -> None:
        answer = self._driver.call("nvmlDeviceGetFieldValues", self._handle, self._batch)
        entries = {key: _decode_field_value(entry) for key, entry in zip(self._batch, answer, strict=True)}
        for field, recipe in self._field_values:
            with self._catch_errors([field]):
                self._accept_entries(values, field, [entries[(i, recipe.scope)] for i in recipe.ids], now)

    def _accept_entries(self, values: dict[int, Value], field: Field, entries: list[Any], now: float) -> None:
        for entry in entries:
            if isinstance(entry, SourceError):
                raise entry
        total = sum(entries) if len(entries) > 1 else entries[0]
        if not field.is_rate:
            self._accept(values, field, total)
        elif (rate := self._compute_rate(field.id, total, now)) is not None:
            self._accept(values, field, rate)

    def _compute_rate(self, field_id: int, total: float, now: float) -> float | None:
        """Returns the increase per second. Returns None on the first call and after the counter was reset."""
        before = self._totals.get(field_id)
        self._totals[field_id] = (now, total)
        if before is None or now <= before[0] or total < before[1]:
            return None
        return (total - before[1]) / (now - before[0])

    def _read_gpm(self, values: dict[int, Value], now: float) -> None:
        answer = self._gpm.read([g.metric for _, g in self._metrics], now)
        for field, recipe in self._metrics:
            code, value = answer.get(recipe.metric, (0, None))
            with self._catch_errors([field]):
                if code:
                    raise translate(code, "nvmlGpmMetricsGet")
                if value is not None:
                    self._accept(values, field, value)


def _select(answer: Any, recipe: NvmlCall) -> Any:
    if recipe.member:
        return getattr(answer, recipe.member)
    return answer if recipe.element is None else answer[recipe.element]


def _decode_field_value(entry: Any) -> Any:
    """Returns the number, or the error of this entry."""
    if entry.nvmlReturn:
        return translate(entry.nvmlReturn, f"NVML field {entry.fieldId}")
    if entry.fieldId == _MEMORY_TEMP:
        return entry.value.uiVal
    member = _VALUE_MEMBERS.get(entry.valueType)
    return getattr(entry.value, member) if member else SourceError("bad_answer", f"value type {entry.valueType}")
