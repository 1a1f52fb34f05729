"""DevicePlan carries out the catalogue's recipes on one device: each call once, field values in a batch, GPM together.

What the device answers "not supported" is struck from its plan until the topology changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from podgpu.errors import DeviceLost, DriverGone, SourceError, Unsupported
from podgpu.gpu.nvml.driver import NvmlDriver, translate
from podgpu.gpu.nvml.energy import ENERGY, EnergyCounter
from podgpu.gpu.nvml.gpm import GpmSampler
from podgpu.metrics.fields import Blank, Call, Field, FieldValue, Gpm, Recorded, value_of
from podgpu.model import Value

_MEMORY_TEMP = 82  # r545 reports a wrong value type for it; it is always an unsigned int
_VALUE_MEMBERS = dict(enumerate(("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")))


class DevicePlan:
    """How one device (a GPU, or a MIG instance through its MIG handle) is read, tick after tick."""

    def __init__(
        self,
        driver: NvmlDriver,
        handle: Any,
        take_gpm: Callable[[Any], None],
        fields: Iterable[Field],
        energy: EnergyCounter | None = None,
    ) -> None:
        """`energy`: the GPU's counter, where what it says is of use to others too."""
        self._driver = driver
        self._handle = handle
        self._energy = energy
        self._gpm = GpmSampler(driver, take_gpm)
        self._wanted = {field.id: field for field in fields}
        self._once: dict[int, Value] = {}
        self._totals: dict[int, tuple[float, float]] = {}
        self.unsupported: set[int] = {f.id for f in self._wanted.values() if f.recipe is None}
        self.dropped: list[int] = []
        self.errors: list[str] = []
        self._compile()

    def _compile(self) -> None:
        live = [f for f in self._wanted.values() if f.id not in self.unsupported and not isinstance(f.recipe, Recorded)]
        self._calls: dict[tuple[str, tuple[int | str, ...]], list[tuple[Field, Call]]] = {}
        self._values: list[tuple[Field, FieldValue]] = []
        self._metrics: list[tuple[Field, Gpm]] = []
        for field in live:
            match field.recipe:
                case Call() as call if field.id not in self._once:
                    self._calls.setdefault((call.function, call.arguments), []).append((field, call))
                case FieldValue() as value:
                    self._values.append((field, value))
                case Gpm() as gpm:
                    self._metrics.append((field, gpm))
        self._batch = sorted({(i, value.scope) for _, value in self._values for i in value.ids})

    def read(self, now: float) -> dict[int, Value]:
        """Field id -> value; raises DeviceLost or DriverGone, anything smaller costs only its own fields."""
        self.dropped.clear()
        self.errors.clear()
        struck = len(self.unsupported) + len(self._once)
        found: dict[int, Value] = dict(self._once)
        self._read_calls(found)
        if self._batch:
            with self._costing_only([f for f, _ in self._values]):
                self._read_batch(found, now)
        if self._metrics:
            with self._costing_only([f for f, _ in self._metrics]):
                self._read_gpm(found, now)
        if len(self.unsupported) + len(self._once) != struck:
            self._compile()
        return found

    def close(self) -> None:
        self._gpm.close()

    @contextmanager
    def _costing_only(self, fields: Sequence[Field]) -> Iterator[None]:
        """What goes wrong inside costs these fields their value, unless the whole device or driver is gone."""
        try:
            yield
        except Unsupported:
            self.unsupported.update(f.id for f in fields)
        except (DeviceLost, DriverGone):
            raise
        except SourceError as e:
            self.errors.append(e.reason)

    def _accept(self, found: dict[int, Value], field: Field, raw: Any) -> None:
        try:
            found[field.id] = value_of(field, raw)
        except Blank:
            self.dropped.append(field.id)
            return
        if field.once:
            self._once[field.id] = found[field.id]

    def _read_calls(self, found: dict[int, Value]) -> None:
        for users in self._calls.values():
            with self._costing_only([f for f, _ in users]):
                self._read_call(found, users)

    def _read_call(self, found: dict[int, Value], users: list[tuple[Field, Call]]) -> None:
        call = users[0][1]
        arguments = [self._driver.constant(a) if isinstance(a, str) else a for a in call.arguments]
        if call.takes_device:
            arguments.insert(0, self._handle)
        shared = self._energy if call.function == ENERGY else None
        answer = shared.ask().counter if shared else self._driver.call(call.function, *arguments)
        for field, recipe in users:
            try:
                self._accept(found, field, _part(answer, recipe))
            except AttributeError:
                self.unsupported.add(field.id)  # an older driver's smaller structure

    def _read_batch(self, found: dict[int, Value], now: float) -> None:
        answer = self._driver.call("nvmlDeviceGetFieldValues", self._handle, self._batch)
        raw = {key: _field_value(entry) for key, entry in zip(self._batch, answer, strict=True)}
        for field, recipe in self._values:
            with self._costing_only([field]):
                self._accept_batch(found, field, recipe, raw, now)

    def _accept_batch(
        self,
        found: dict[int, Value],
        field: Field,
        recipe: FieldValue,
        raw: dict[tuple[int, int], Any],
        now: float,
    ) -> None:
        parts = [raw[(i, recipe.scope)] for i in recipe.ids]
        for part in parts:
            if isinstance(part, SourceError):
                raise part
        total = sum(parts) if len(parts) > 1 else parts[0]
        if not field.is_rate:
            self._accept(found, field, total)
        elif (rate := self._rate(field.id, total, now)) is not None:
            self._accept(found, field, rate)

    def _rate(self, field_id: int, total: float, now: float) -> float | None:
        """Per second since the last tick; None the first time and after a counter fell back."""
        before = self._totals.get(field_id)
        self._totals[field_id] = (now, total)
        if before is None or now <= before[0] or total < before[1]:
            return None
        return (total - before[1]) / (now - before[0])

    def _read_gpm(self, found: dict[int, Value], now: float) -> None:
        answer = self._gpm.read([g.metric for _, g in self._metrics], now)
        for field, recipe in self._metrics:
            code, value = answer.get(recipe.metric, (0, None))
            with self._costing_only([field]):
                if code:
                    raise translate(code, "nvmlGpmMetricsGet")
                if value is not None:
                    self._accept(found, field, value)


def _part(answer: Any, recipe: Call) -> Any:
    if recipe.member:
        return getattr(answer, recipe.member)
    return answer if recipe.element is None else answer[recipe.element]


def _field_value(entry: Any) -> Any:
    """The number in a field value, or the error its own return code stands for."""
    if entry.nvmlReturn:
        return translate(entry.nvmlReturn, f"NVML field {entry.fieldId}")
    if entry.fieldId == _MEMORY_TEMP:
        return entry.value.uiVal
    member = _VALUE_MEMBERS.get(entry.valueType)
    return getattr(entry.value, member) if member else SourceError("bad_answer", f"value type {entry.valueType}")
