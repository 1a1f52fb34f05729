"""Holds each text against the truth: every sample names a true holder, counters never fall, what is split adds up."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from endurance.soak.truth import REMEMBERED, Holding
from endurance.soak.world import World
from podgpu.holders.cache import GRACE_SECONDS
from podgpu.metrics.families import LAST_HOLDER
from podgpu.metrics.parse import ParsedFamily, ParsedSample, parse_text

INTERVAL = 5.0
"""Seconds between two allocation turns, and two telemetry turns."""
_SETTLED = 2 * INTERVAL + 1.0
"""A change is in the metrics by then; sooner it may be."""
_UNSURE = GRACE_SECONDS + 2 * INTERVAL + 60.0
"""So long a mapping may outlive what it says, while and just after the kubelet is not well."""
_HEALED = 90.0
"""Seconds after which what was ill is whole again: NVML is begun anew at most once a minute."""
_QUIET = 3 * _SETTLED
_DRIVERS_OWN = ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "podgpu_device_throttled_seconds_total")
"""Counters of the driver that a reset of the GPU sets back. Others that dcgm-exporter calls counters are rates."""
_BUSY, _ENERGY = "busy_seconds_total", "energy_joules_total"
_SPLITS = tuple(
    (f"podgpu_container_gpu_{unit}", f"podgpu_device_unattributed_{unit}", f"podgpu_device_{unit}")
    for unit in (_BUSY, _ENERGY)
)
"""Parts, what is nobody's, and the whole."""
_SHARED_OUT = (
    "podgpu_namespace_gpu_energy_joules_total",
    "podgpu_device_unattributed_energy_joules_total",
    "podgpu_device_energy_joules_total",
)
"""What all namespaces used, those who left included, what is nobody's, and the whole."""
_WHOSE = ("UUID", "GPU_I_ID", "namespace", "modelName")
"""What a total goes by. Not by the GPU's number, which is another when one before it is lost."""
Series = tuple[str, frozenset[tuple[str, str]]]
Sums = dict[tuple[str, str, str], tuple[float, frozenset[str]]]


class Judge:
    def __init__(self, world: World) -> None:
        self._world = world
        self._truth = world.truth
        self.breaches: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.expositions = 0
        self.attributed = 0
        """Samples with a pod on them that were held against the truth."""
        self._counters: dict[Series, float] = {}
        self._sums: Sums = {}
        self._totals: dict[str, dict[tuple[str, ...], float]] = {family: {} for family in _SHARED_OUT}

    def look(self, exposition: str) -> None:
        families = parse_text(exposition)
        self.expositions += 1
        samples = {family.name: family.samples for family in families}
        info = {_holding(sample.labels) for sample in samples.get("podgpu_allocation_info", ())}
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
            self.examples[rule] = f"{example} at {at:.0f} s ({self._truth.describe()})"

    def _judge_holders(self, info: set[Holding], shares: Iterable[ParsedSample]) -> None:
        truth, now = self._truth, self._world.clock.monotonic()
        is_well = truth.kubelet_well_for() > _SETTLED
        allowed = _SETTLED if truth.kubelet_well_for() > _UNSURE else _UNSURE
        for holding in info:
            if not truth.held_within(holding, allowed):
                self.breach("an exposition names who does not hold the device", holding)
        for holding, since in truth.held.items():
            number = self._number(holding.uuid)
            if is_well and now - since > _SETTLED and truth.gpu_well_for(number) > _HEALED and holding not in info:
                self.breach("a holder is not in the metrics", holding)
        for sample in shares:
            held = _holding(sample.labels)
            true_share = truth.shares.get(held)
            if true_share is not None and abs(sample.value - true_share) > 1e-9:
                self.breach("a share is not the part that was given", f"{held}: {sample.value}")

    def _judge_samples(self, families: Iterable[ParsedFamily], info: set[Holding]) -> None:
        holders = Counter((holding.uuid, holding.gi_id) for holding in info)
        for family in families:
            for name, labels, _value, _ in family.samples:
                if not labels.get("pod") or name.startswith("podgpu_allocation"):
                    continue
                held = _holding(labels)
                self.attributed += 1
                if name == LAST_HOLDER.name and self._truth.held_part_within(held, REMEMBERED):
                    continue  # of a lost GPU, which stands for its instances too; nobody need have held it since
                if not self._truth.held_within(held, _UNSURE):
                    self.breach("a sample names who never held the device", f"{name} {held}")
                elif name.startswith("DCGM_") and (held not in info or holders[held.uuid, held.gi_id] != 1):
                    self.breach("a device's figure is not its sole holder's", f"{name} {held}")

    def _judge_presence(self, temperatures: Iterable[ParsedSample]) -> None:
        shown = {sample.labels["UUID"] for sample in temperatures}
        for number in self._world.numbers:
            if self._truth.gpu_well_for(number) > _HEALED and self._world.uuid_of(number) not in shown:
                self.breach("a healthy GPU is not in the metrics", number)

    def _judge_counters(self, families: Iterable[ParsedFamily]) -> None:
        """Across gaps too, but for containers, whose accounts end with them, and what a driver's reset sets back."""
        new: dict[Series, float] = {}
        for family in families:
            if family.type != "counter" or not (family.name.startswith("podgpu_") or family.name in _DRIVERS_OWN):
                continue
            for name, labels, value, _ in family.samples:
                series = (name, frozenset(labels.items()))
                before = self._counters.get(series, 0.0)
                if value < before and not (name in _DRIVERS_OWN and labels["UUID"] in self._truth.resets):
                    self.breach("a counter falls", f"{name}{dict(labels)}: {before} to {value}")
                new[series] = value
        lasting = {s: v for s, v in self._counters.items() if _lasts(s) and not self._was_reset(s)}
        self._counters = lasting | new
        self._truth.resets.clear()

    def _was_reset(self, series: Series) -> bool:
        return any(name == "UUID" and value in self._truth.resets for name, value in series[1])

    def _judge_sums(self, samples: Mapping[str, tuple[ParsedSample, ...]]) -> None:
        """What a device used since the last exposition is what its containers did and what is nobody's; MIG apart."""
        new: Sums = {}
        for families in _SPLITS:
            whole, found = families[2], defaultdict[str, dict[str, float]](dict)
            for family in families:
                for sample in samples.get(family, ()):
                    device = f"{sample.labels['UUID']}/{sample.labels.get('GPU_I_ID', '')}"
                    found[device][sample.labels.get("pod") or family] = sample.value
            for device, values in found.items():
                new |= {(whole, device, key): (value, frozenset(values)) for key, value in values.items()}
                if sum(other.startswith(device) for other in found) == 1 and device.endswith("/"):
                    self._compare(whole, device, values)
        self._sums = new

    def _judge_totals(self, samples: Mapping[str, tuple[ParsedSample, ...]]) -> None:
        """Since the start, whoever came and went, and whichever GPUs were away: as each was last told."""
        for family, totals in self._totals.items():
            totals |= {
                tuple(sample.labels.get(name, "") for name in _WHOSE): sample.value
                for sample in samples.get(family, ())
            }
        namespaces, rest, whole = (self._totals[family] for family in _SHARED_OUT)
        divided = sum(namespaces.values()) + sum(rest.values())
        used = sum(value for device, value in whole.items() if device in rest)
        if abs(used - divided) > 1e-3 + 1e-6 * used:
            self.breach("namespaces and nobody do not come to what the devices used", f"{divided} J of {used} J")

    def _compare(self, whole: str, device: str, values: Mapping[str, float]) -> None:
        """Only where nobody came or went since the text before: an account that ended takes its last part along, and
        where the GPU did not answer that is told once it does."""
        quiet = self._world.clock.monotonic() - self._truth.changed.get(device.rstrip("/"), 0.0)
        quiet = min(quiet, self._truth.gpu_well_for(self._number(device.rstrip("/"))))
        if min(quiet, self._truth.kubelet_well_for() - _UNSURE) < _QUIET:
            return
        before = {key: self._sums.get((whole, device, key)) for key in values}
        if any(b is None or b[1] != frozenset(values) for b in before.values()):
            return
        change = {key: values[key] - b[0] for key, b in before.items() if b is not None}
        total = change.pop(whole, None)
        if total is not None and change and abs(total - sum(change.values())) > 1e-3 + 1e-6 * abs(total):
            self.breach("what is split does not add up", f"{whole} on {device}: {total} is not {change}")

    def _number(self, uuid: str) -> int:
        return next((n for n in self._world.numbers if self._world.uuid_of(n) == uuid), -1)


def _holding(labels: Mapping[str, str]) -> Holding:
    return Holding(labels["UUID"], labels.get("GPU_I_ID", ""), labels["namespace"], labels["pod"])


def _lasts(series: Series) -> bool:
    """Series of devices, namespaces and podgpu itself go on where they were; a container's ends with it."""
    return series[0].startswith("podgpu_") and "container" not in series[0]
