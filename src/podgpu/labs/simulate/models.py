"""Defines the GPU models that can be simulated, and parses specs.

A spec is a text such as `8xH100` or `1xA100/2x1g.5gb+1x3g.20gb,L4`.

The numbers of the H200 in models.csv were measured, except its MIG sizes. The numbers of other
models are estimates. Each model has only the features of the real GPU: a T4 has no MIG, an L40S no
memory temperature, an A100 no GPM.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from podgpu.errors import UsageError

MIB = 1024**2
# Architecture numbers of NVML. Later architectures have larger numbers.
AMPERE = 7
HOPPER = 9
MAX_GPUS = 64  # limited by the PCI bus numbers that simulated GPUs use
_COUNTED = re.compile(r"(?:([1-9]\d?)x)?(\S.*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class MigProfile:
    name: str
    compute_slices: int
    memory_slices: int
    memory_mib: int


@dataclass(frozen=True, slots=True)
class GpuModel:
    name: str  # as returned by nvmlDeviceGetName
    architecture: int
    compute_capability: tuple[int, int]
    memory: int
    reserved: int
    sm_clock: tuple[int, int]  # MHz: idle, highest boost
    memory_clock: tuple[int, int]
    video_clock: tuple[int, int]
    power: tuple[int, int, int]  # watts: idle, lowest limit, highest limit (also the default)
    pci_device: int
    pcie_generation: int
    idle_pstate: int
    brand: int
    hbm: bool
    ecc: bool
    fan: bool
    nvlinks: int
    compute_slices: int
    memory_slices: int
    profiles: tuple[MigProfile, ...]

    @property
    def gpm(self) -> bool:
        return self.architecture >= HOPPER


def _parse_model(row: dict[str, str]) -> GpuModel:
    values: dict[str, Any] = dict(row)
    for column in ("compute_capability", "sm_clock", "memory_clock", "video_clock", "power"):
        values[column] = re.split("[-.]", row[column])
    for column in ("memory", "reserved"):
        values[column] = int(float(row[f"{column}_mib"]) * MIB)
    values["pci_device"] = int(row["pci_device"], 16)

    values["profiles"] = [_parse_profile(text) for text in row["profiles"].split()]
    return msgspec.convert(values, GpuModel, strict=False)


def _parse_profile(text: str) -> MigProfile:
    name, compute_slices, memory_slices, memory_mib = text.split(":")
    return MigProfile(name, int(compute_slices), int(memory_slices), int(memory_mib))


_TABLE = Path(__file__).with_name("models.csv").read_text(encoding="utf-8")
MODELS = {row["key"]: _parse_model(row) for row in csv.DictReader(_TABLE.splitlines())}


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """A GPU to simulate. MIG is enabled if `profiles` is not empty."""

    model: GpuModel
    profiles: tuple[MigProfile, ...] = ()


def parse_spec(text: str) -> tuple[GpuSpec, ...]:
    """Parses a spec such as `2xH100,L4`. Returns one `GpuSpec` per GPU.

    Raises UsageError if the spec is invalid.
    """
    gpus: list[GpuSpec] = []
    for group in text.split(","):
        count, spec = _parse_group(group.strip())
        if len(gpus) + count > MAX_GPUS:
            raise UsageError(f"GPU spec {text!r} has more than {MAX_GPUS} GPUs on one node")
        gpus += [spec] * count
    return tuple(gpus)


def parse_profiles(model: GpuModel, names: Iterable[str]) -> tuple[MigProfile, ...]:
    """Returns the MIG profiles with these names.

    Raises UsageError for unknown profiles, or if they do not fit.
    """
    known = {profile.name: profile for profile in model.profiles}
    profiles = []
    for name in names:
        profile = known.get(name.lower())
        if profile is None:
            raise _unknown("MIG profile", f"{name!r} of {model.name}", known)
        profiles.append(profile)

    compute = sum(profile.compute_slices for profile in profiles)
    memory = sum(profile.memory_slices for profile in profiles)
    if compute > model.compute_slices or memory > model.memory_slices:
        layout = "+".join(profile.name for profile in profiles)
        raise UsageError(
            f"{layout} does not fit {model.name}: "
            f"{compute} of {model.compute_slices} compute slices, "
            f"{memory} of {model.memory_slices} memory slices"
        )
    return tuple(profiles)


def _parse_group(group: str) -> tuple[int, GpuSpec]:
    gpus, slash, layout = group.partition("/")
    count, name = _parse_counted(gpus, group)
    models = {key.lower(): model for key, model in MODELS.items()}
    model = models.get(name.lower())
    if model is None:
        raise _unknown("GPU model", repr(name), MODELS)

    profiles = []
    if slash:
        for part in layout.split("+"):
            instances, profile = _parse_counted(part.strip(), group)
            profiles += [profile] * instances
    return count, GpuSpec(model, parse_profiles(model, profiles))


def _parse_counted(part: str, group: str) -> tuple[int, str]:
    match = _COUNTED.fullmatch(part)
    if match is None:
        raise UsageError(
            f"GPU spec group {group!r} must be COUNTxMODEL or COUNTxMODEL/COUNTxPROFILE+..."
        )
    return int(match[1] or 1), match[2]


def _unknown(kind: str, name: str, known: Iterable[str]) -> UsageError:
    return UsageError(f"{kind} {name} cannot be simulated; known: {', '.join(known) or 'none'}")
