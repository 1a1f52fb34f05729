"""This module reads a node's GPUs from one short line: `8xH100`, `1xH100/7x1g.10gb`, `2xA100,L4`,
`1xA100/2x1g.5gb+1x3g.20gb`.

Pure: text in, `GpuSpec` out, or one line that says what is wrong and what would be right.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from podgpu.errors import UsageError
from podgpu.simulate.models import MODELS, GpuModel, MigProfile

MAX_GPUS = 64
"""More than any node has; each gets its own PCI bus below 0x84."""

_COUNTED = re.compile(r"(?:(\d{1,6})x)?(\S.*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One GPU to simulate. MIG is on when `profiles` names instances."""

    model: GpuModel
    profiles: tuple[MigProfile, ...] = ()


def parse_spec(text: str) -> tuple[GpuSpec, ...]:
    """One `GpuSpec` per GPU, in the order of the text."""
    gpus: list[GpuSpec] = []
    for group in text.split(","):
        count, spec = _parse_group(group.strip())
        if len(gpus) + count > MAX_GPUS:
            raise UsageError(f"GPU spec {text!r} asks for more than {MAX_GPUS} GPUs on one node")
        gpus += [spec] * count
    return tuple(gpus)


def parse_profiles(model: GpuModel, names: Iterable[str]) -> tuple[MigProfile, ...]:
    """The instances named, checked against what the model can be cut into."""
    profiles = tuple(_find_profile(model, name) for name in names)
    _check_slices(model, profiles)
    return profiles


def _parse_group(group: str) -> tuple[int, GpuSpec]:
    gpus, slash, layout = group.partition("/")
    count, name = _parse_counted(gpus, group)
    model = _find_model(name)
    if not slash:
        return count, GpuSpec(model)
    names: list[str] = []
    for part in layout.split("+"):
        instances, profile = _parse_counted(part.strip(), group)
        # Anything past the slice count is refused below anyway; a huge count must not fill memory first.
        names += [profile] * min(instances, model.compute_slices + 1)
    return count, GpuSpec(model, parse_profiles(model, names))


def _parse_counted(part: str, group: str) -> tuple[int, str]:
    match = _COUNTED.fullmatch(part)
    if match is None:
        raise UsageError(f"GPU spec group {group!r} is not COUNTxMODEL or COUNTxMODEL/COUNTxPROFILE+...")
    count = int(match[1] or 1)
    if count == 0:
        raise UsageError(f"GPU spec group {group!r} asks for zero of {match[2]!r}; leave it out instead")
    return count, match[2]


def _find_model(name: str) -> GpuModel:
    for known, model in MODELS.items():
        if known.lower() == name.lower():
            return model
    raise UsageError(f"no simulated GPU model {name!r}; {_nearest_models(name)}")


def _find_profile(model: GpuModel, name: str) -> MigProfile:
    if not model.profiles:
        raise UsageError(f"{model.name} has no MIG, so it cannot be cut into {name!r}")
    profile = model.profile(name.lower())
    if profile is None:
        known = ", ".join(profile.name for profile in model.profiles)
        raise UsageError(f"{model.name} has no MIG profile {name!r}; it has {known}")
    return profile


def _check_slices(model: GpuModel, profiles: Sequence[MigProfile]) -> None:
    compute = sum(profile.compute_slices for profile in profiles)
    memory = sum(profile.memory_slices for profile in profiles)
    if compute > model.compute_slices or memory > model.memory_slices:
        layout = "+".join(profile.name for profile in profiles)
        raise UsageError(
            f"{layout} does not fit {model.name}: {compute} of {model.compute_slices} compute slices, "
            f"{memory} of {model.memory_slices} memory slices"
        )


def _nearest_models(name: str) -> str:
    by_lower = {known.lower(): known for known in MODELS}
    import difflib  # not needed until there is something to say

    close = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.5)
    if not close:
        return f"known: {', '.join(MODELS)}"
    return f"did you mean {' or '.join(by_lower[known] for known in close)}?"
