"""Compares the metrics with the truth: correct holders, counters that never decrease, correct
sums.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from endurance.soak.truth import RELEASED_SECONDS, HeldDevice
from endurance.soak.world import World
from podgpu.metrics.parse import ParsedFamily, ParsedSample, parse_text
from podgpu.node.gpu.nvml.nvml_telemetry import SEARCH_SECONDS
from podgpu.node.holders.reader import GRACE_SECONDS

INTERVAL = 5.0
"""Seconds between two allocation turns, and two telemetry turns."""
_SETTLED = 2 * INTERVAL + 1.0
"""Maximum seconds until a change is in the metrics."""
_UNSURE = GRACE_SECONDS + 2 * INTERVAL + 60.0
"""How long a released holder may still be shown while the kubelet does not answer."""
_HEALED = 90.0
"""Seconds after which a repaired GPU is shown again."""
_RELISTED = SEARCH_SECONDS + 2 * INTERVAL
"""The same for a GPU that the driver did not list: it is listed again when the driver is reopened.
"""
_REOPENED = 4 * INTERVAL
"""Seconds after which the driver is reopened, if a call that hung prevented it."""
_QUIET = 3 * _SETTLED
_DRIVER_COUNTERS = ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "podgpu_device_throttled_seconds_total")
"""Counters that a reset of the GPU sets back. Other counters of dcgm-exporter are rates."""
_BUSY, _ENERGY = "busy_seconds_total", "energy_joules_total"
_SPLITS = tuple(
    (f"podgpu_container_gpu_{unit}", f"podgpu_device_unattributed_{unit}", f"podgpu_device_{unit}")
    for unit in (_BUSY, _ENERGY)
)
"""Families of the parts, the unattributed rest, and the whole."""
_ENERGY_FAMILIES = (
    "podgpu_namespace_gpu_energy_joules_total",
    "podgpu_device_unattributed_energy_joules_total",
    "podgpu_device_energy_joules_total",
)
"""Energy of all namespaces (with ended pods), the unattributed rest, and the devices."""
_TOTAL_LABELS = ("UUID", "GPU_I_ID", "namespace", "modelName")
"""Labels that identify a total. The GPU's number changes when another GPU is lost."""
Series = tuple[str, frozenset[tuple[str, str]]]
Sums = dict[tuple[str, str, str], tuple[float, frozenset[str]]]


class Judge:
    def __init__(self, world: World, log: Iterable[str] = ()) -> None:
        """`log`: the last lines of the agent's log, to explain the first breach of a rule."""
        self._world = world
        self._log = log
        self._truth = world.truth
        self.breaches: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.expositions = 0
        self.attributed = 0
        """Samples with a pod that were checked."""
        self._counters: dict[Series, float] = {}
        self._sums: Sums = {}
        self._totals: dict[str, dict[tuple[str, ...], float]] = {
            family: {} for family in _ENERGY_FAMILIES
        }

    def look(self, exposition: str) -> None:
        families = parse_text(exposition)
        self.expositions += 1
        samples = {family.name: family.samples for family in families}
        info = {_held_device(sample.labels) for sample in samples.get("podgpu_allocation_info", ())}
        self._judge_holders(info, samples.get("podgpu_allocation_share_ratio", ()))
        self._judge_samples(families, info)
        self._judge_presence(samples.get("DCGM_FI_DEV_GPU_TEMP", ()))
        self._judge_counters(families)
        self._judge_sums(samples)
        self._judge_totals(samples)

    def breach(self, rule: str, example: object) -> None:
        self.breaches[rule] += 1
        if rule not in self.examples:
            at = self._world.clock.monotonic()
            text = f"{example} at {at:.0f} s ({self._truth.describe()}); the last log lines:"
            self.examples[rule] = "\n  ".join((text, *self._log))

    def _judge_holders(self, info: set[HeldDevice], shares: Iterable[ParsedSample]) -> None:
        truth, now = self._truth, self._world.clock.monotonic()
        is_well = truth.kubelet_healthy_for() > _SETTLED
        allowed = _SETTLED if truth.kubelet_healthy_for() > _UNSURE else _UNSURE
        for holding in info:
            if not truth.held_within(holding, allowed):
                self.breach("metrics name a pod that does not hold the device", holding)
        for holding, since in truth.held.items():
            number = self._number(holding.uuid)
            if (
                is_well
                and now - since > _SETTLED
                and truth.gpu_healthy_for(number) > _HEALED
                and holding not in info
            ):
                self.breach("a holder is not in the metrics", holding)
        for sample in shares:
            held = _held_device(sample.labels)
            true_share = truth.shares.get(held)
            if true_share is not None and abs(sample.value - true_share) > 1e-9:
                self.breach("a share differs from the allocated part", f"{held}: {sample.value}")

    def _judge_samples(self, families: Iterable[ParsedFamily], info: set[HeldDevice]) -> None:
        holders = Counter((holding.uuid, holding.gi_id) for holding in info)
        for family in families:
            for name, labels, _value in family.samples:
                if not labels.get("pod") or name.startswith("podgpu_allocation"):
                    continue
                held = _held_device(labels)
                self.attributed += 1
                if name == "podgpu_device_last_holder_info" and self._truth.held_part_within(
                    held, RELEASED_SECONDS
                ):
                    continue  # a lost GPU also shows the last holders of its instances
                if not self._truth.held_within(held, _UNSURE):
                    self.breach("a sample names a pod that never held the device", f"{name} {held}")
                elif name.startswith("DCGM_") and (
                    held not in info or holders[held.uuid, held.gi_id] != 1
                ):
                    self.breach(
                        "a device series has a pod, but several pods hold it", f"{name} {held}"
                    )

    def _judge_presence(self, temperatures: Iterable[ParsedSample]) -> None:
        truth, shown = self._truth, {sample.labels["UUID"] for sample in temperatures}
        for number in self._world.numbers:
            healthy = truth.gpu_healthy_for(number)
            if self._world.uuid_of(number) in shown:
                if healthy > 0:
                    truth.unlisted.discard(number)
            elif number in truth.unlisted:
                if healthy > _RELISTED and truth.no_call_hangs_for() > _REOPENED:
                    self.breach("a healthy GPU is not in the metrics", number)
            elif healthy > _HEALED:
                self.breach("a healthy GPU is not in the metrics", number)

    def _judge_counters(self, families: Iterable[ParsedFamily]) -> None:
        """Checks that counters never decrease, also across gaps. Excludes ended containers and
        resets.
        """
        new: dict[Series, float] = {}
        for family in families:
            if family.type != "counter" or not (
                family.name.startswith("podgpu_") or family.name in _DRIVER_COUNTERS
            ):
                continue
            for name, labels, value in family.samples:
                series = (name, frozenset(labels.items()))
                before = self._counters.get(series, 0.0)
                if value < before and not (
                    name in _DRIVER_COUNTERS and labels["UUID"] in self._truth.resets
                ):
                    self.breach("a counter decreases", f"{name}{dict(labels)}: {before} to {value}")
                new[series] = value
        lasting = {s: v for s, v in self._counters.items() if _lasts(s) and not self._was_reset(s)}
        self._counters = lasting | new
        self._truth.resets.clear()

    def _was_reset(self, series: Series) -> bool:
        return any(name == "UUID" and value in self._truth.resets for name, value in series[1])

    def _judge_sums(self, samples: Mapping[str, Sequence[ParsedSample]]) -> None:
        """Checks that the use of containers and the rest add up to the device's use since the last
        check. Skips MIG.
        """
        new: Sums = {}
        for families in _SPLITS:
            whole, found = families[2], defaultdict[str, dict[str, float]](dict)
            for family in families:
                for sample in samples.get(family, ()):
                    device = f"{sample.labels['UUID']}/{sample.labels.get('GPU_I_ID', '')}"
                    found[device][sample.labels.get("pod") or family] = sample.value
            for device, values in found.items():
                new |= {
                    (whole, device, key): (value, frozenset(values))
                    for key, value in values.items()
                }
                if sum(other.startswith(device) for other in found) == 1 and device.endswith("/"):
                    self._compare(whole, device, values)
        self._sums = new

    def _judge_totals(self, samples: Mapping[str, Sequence[ParsedSample]]) -> None:
        """Checks the totals since the start, using the last known value of every series."""
        for family, totals in self._totals.items():
            totals |= {
                tuple(sample.labels.get(name, "") for name in _TOTAL_LABELS): sample.value
                for sample in samples.get(family, ())
            }
        namespaces, rest, whole = (self._totals[family] for family in _ENERGY_FAMILIES)
        divided = sum(namespaces.values()) + sum(rest.values())
        used = sum(value for device, value in whole.items() if device in rest)
        if abs(used - divided) > 1e-3 + 1e-6 * used:
            self.breach(
                "namespaces and the rest do not add up to the devices", f"{divided} J of {used} J"
            )

    def _compare(self, whole: str, device: str, values: Mapping[str, float]) -> None:
        """Compares only if no holder changed since the last check, and the GPU answered."""
        quiet = self._world.clock.monotonic() - self._truth.changed.get(device.rstrip("/"), 0.0)
        quiet = min(quiet, self._truth.gpu_healthy_for(self._number(device.rstrip("/"))))
        if min(quiet, self._truth.kubelet_healthy_for() - _UNSURE) < _QUIET:
            return
        before = {key: self._sums.get((whole, device, key)) for key in values}
        if any(b is None or b[1] != frozenset(values) for b in before.values()):
            return
        change = {key: values[key] - b[0] for key, b in before.items() if b is not None}
        total = change.pop(whole, None)
        if (
            total is not None
            and change
            and abs(total - sum(change.values())) > 1e-3 + 1e-6 * abs(total)
        ):
            self.breach(
                "parts do not add up to the device", f"{whole} on {device}: {total} is not {change}"
            )

    def _number(self, uuid: str) -> int:
        return next((n for n in self._world.numbers if self._world.uuid_of(n) == uuid), -1)


def _held_device(labels: Mapping[str, str]) -> HeldDevice:
    return HeldDevice(
        labels["UUID"], labels.get("GPU_I_ID", ""), labels["namespace"], labels["pod"]
    )


def _lasts(series: Series) -> bool:
    """Returns True for series of devices and namespaces, which continue after a gap. Series of
    containers end.
    """
    return series[0].startswith("podgpu_") and "container" not in series[0]
