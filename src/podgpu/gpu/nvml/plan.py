"""Reads the fields of one device: executes the recipes of `metrics/fields.csv` with as few NVML calls as possible."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from podgpu.errors import SourceError
from podgpu.gpu.nvml.driver import CallGuard, NvmlDriver, translate
from podgpu.metrics.fields import Blank, Field, FieldValue, Gpm, NvmlCall, value_of
from podgpu.model import Value

_VALUE_MEMBERS = dict(enumerate(("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")))
MIN_GPM_SECONDS = 0.1
"""NVML requires at least 100 ms between two GPM samples."""


class GpmSampler:
    """Reads profiling metrics (GPM) of one GPU or GPU instance, as means between two samples. Needs Hopper or later."""

    def __init__(self, driver: NvmlDriver, gpu: Any, gi_id: int | None = None) -> None:
        """`gpu`: handle of the physical GPU."""
        self._driver = driver
        self._gpu = gpu
        self._gi_id = gi_id
        self._samples: list[Any] = []
        self.last_at: float | None = None
        """Time of the last sample."""

    def read(self, metrics: Sequence[int], now: float) -> dict[int, tuple[int, float]]:
        """Returns (NVML return code, percent or MiB/s) per metric, as means since the last call.

        Returns nothing in the first call.
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
        values = {} if self.last_at is None else self._compute(older, newer, metrics)
        self._samples = [newer, older]
        self.last_at = now
        return values

    def _compute(self, older: Any, newer: Any, metrics: Sequence[int]) -> dict[int, tuple[int, float]]:
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
        self._samples, self.last_at = [], None


class DevicePlan:
    """Reads a set of fields of one GPU or MIG device. Fields that are not supported are not read again."""

    def __init__(self, driver: NvmlDriver, handle: Any, gpm: GpmSampler, fields: Sequence[Field]) -> None:
        self._driver = driver
        self._handle = handle
        self._gpm = gpm
        self._fields = fields
        self._values: dict[int, Value] = {}
        self._once: dict[int, Value] = {}
        self._totals: dict[int, tuple[float, float]] = {}
        """Field id -> time and value of the last reading, for rates."""
        self.guard = CallGuard(field.id for field in fields if field.recipe is None)

    def read(self, now: float) -> dict[int, Value]:
        """Returns values by field id. Raises DeviceLost or DriverGone; other errors affect only their fields."""
        self.guard.begin()
        self._values = dict(self._once)
        calls: dict[tuple[str, tuple[int | str, ...]], list[tuple[Field, NvmlCall]]] = {}
        field_values: list[tuple[Field, FieldValue]] = []
        metrics: list[tuple[Field, Gpm]] = []
        for field in self._fields:
            match field.recipe:
                case _ if field.id in self.guard.unsupported or field.id in self._once:
                    continue
                case NvmlCall() as call:
                    calls.setdefault((call.function, call.arguments), []).append((field, call))
                case FieldValue() as value:
                    field_values.append((field, value))
                case Gpm() as gpm:
                    metrics.append((field, gpm))
        for users in calls.values():
            with self.guard.catch(*(field.id for field, _ in users)):
                self._read_call(users)
        if field_values:
            with self.guard.catch(*(field.id for field, _ in field_values)):
                self._read_field_values(field_values, now)
        if metrics:
            with self.guard.catch(*(field.id for field, _ in metrics)):
                self._read_gpm(metrics, now)
        return self._values

    def close(self) -> None:
        self._gpm.close()

    def _accept(self, field: Field, raw: Any) -> None:
        try:
            value = self._values[field.id] = value_of(field, raw)
        except Blank:
            self.guard.dropped.append(field.id)
            return
        if field.once:
            self._once[field.id] = value

    def _read_call(self, users: list[tuple[Field, NvmlCall]]) -> None:
        call = users[0][1]
        arguments = [self._driver.constant(a) if isinstance(a, str) else a for a in call.arguments]
        if call.takes_device:
            arguments.insert(0, self._handle)
        answer = self._driver.call(call.function, *arguments)
        for field, recipe in users:
            try:
                value = getattr(answer, recipe.member) if recipe.member else answer
            except AttributeError:
                self.guard.unsupported.add(field.id)  # an older driver returns a smaller structure without this value
                continue
            self._accept(field, value if recipe.element is None else value[recipe.element])

    def _read_field_values(self, users: list[tuple[Field, FieldValue]], now: float) -> None:
        batch = sorted({(i, recipe.scope) for _, recipe in users for i in recipe.ids})
        answer = self._driver.call("nvmlDeviceGetFieldValues", self._handle, batch)
        entries = dict(zip(batch, answer, strict=True))
        for field, recipe in users:
            with self.guard.catch(field.id):
                numbers = [_decode_field_value(entries[i, recipe.scope]) for i in recipe.ids]
                total = sum(numbers) if len(numbers) > 1 else numbers[0]
                if not field.is_rate:
                    self._accept(field, total)
                elif (rate := self._compute_rate(field.id, total, now)) is not None:
                    self._accept(field, rate)

    def _compute_rate(self, field_id: int, total: float, now: float) -> float | None:
        """Returns the increase per second. Returns None on the first call and after the counter was reset."""
        before = self._totals.get(field_id)
        self._totals[field_id] = (now, total)
        if before is None or now <= before[0] or total < before[1]:
            return None
        return (total - before[1]) / (now - before[0])

    def _read_gpm(self, users: list[tuple[Field, Gpm]], now: float) -> None:
        answer = self._gpm.read([recipe.metric for _, recipe in users], now)
        for field, recipe in users:
            code, value = answer.get(recipe.metric, (0, None))
            with self.guard.catch(field.id):
                if code:
                    raise translate(code, "nvmlGpmMetricsGet")
                if value is not None:
                    self._accept(field, value)


def _decode_field_value(entry: Any) -> Any:
    if entry.nvmlReturn:
        raise translate(entry.nvmlReturn, f"NVML field {entry.fieldId}")
    if member := _VALUE_MEMBERS.get(entry.valueType):
        return getattr(entry.value, member)
    raise SourceError("bad_answer", f"NVML field {entry.fieldId} has the unknown value type {entry.valueType}")
