"""This module finds which of the wanted counters each GPU model does not give, and whether it has GPM. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from podgpu.doctor.findings import Finding, note, ok
from podgpu.doctor.gpus import DRIVER_VERSION, NVML_VERSION, Gpus
from podgpu.errors import few_of
from podgpu.gpu.source import GpuAnswer
from podgpu.metrics.counters import Counter
from podgpu.metrics.fields import Field, Gpm, fields

_GR_ENGINE_ACTIVE = 1001
_MOST_NAMES = 10
_PROFILING = "profiling"


def fields_to_ask(counters: Sequence[Counter]) -> tuple[Field, ...]:
    """The counter file's, the versions, and one that only GPM gives."""
    own = (DRIVER_VERSION, NVML_VERSION, _GR_ENGINE_ACTIVE)
    return tuple({f.id: f for f in (*(c.field for c in counters), *(fields()[i] for i in own))}.values())


def judge_counters(gpus: Gpus, counters: Sequence[Counter], lender: str = "") -> list[Finding]:
    """`lender`: the program that gives the figures, where it is not the driver: it needs no GPM."""
    models: dict[str, list[GpuAnswer]] = {}
    for gpu, answer in gpus.answers.items():
        in_mig_mode = any(r.device.mig_enabled for r in answer.readings)
        models.setdefault(gpu.model + (" in MIG mode" if in_mig_mode else ""), []).append(answer)
    if lender:
        missing = {model: _all_missing(answers, counters) for model, answers in models.items()}
        advice = f"they have no series: let {lender} give them, if you want them"
        found = (_judge_fields(model, [c.name for c in of], len(counters), advice) for model, of in missing.items())
        return [finding for findings in found for finding in findings]
    judged = (_judge_model(model, answers, counters) for model, answers in models.items())
    return [finding for findings in judged for finding in findings]


def _judge_model(model: str, answers: Sequence[GpuAnswer], counters: Sequence[Counter]) -> list[Finding]:
    has_gpm = any(_gave_gpm(answer) for answer in answers)
    missing = _all_missing(answers, counters)
    from_gpm = [] if has_gpm else [c for c in missing if isinstance(c.field.recipe, Gpm)]
    others = [c.name for c in missing if c not in from_gpm]
    return [*_judge_fields(model, others, len(counters)), _judge_gpm(model, has_gpm, [c.name for c in from_gpm])]


def _all_missing(answers: Sequence[GpuAnswer], counters: Sequence[Counter]) -> list[Counter]:
    missing = {i for answer in answers for i in _missing(answer)}
    return [c for c in counters if c.field.id in missing]


def _missing(answer: GpuAnswer) -> set[int]:
    """Cannot be had from the GPU nor from any instance on it."""
    given: set[int] = {i for r in answer.readings for i in r.values}
    return {i for _, i in answer.unsupported} - given


def _gave_gpm(answer: GpuAnswer) -> bool:
    values: Iterable[Mapping[int, object]] = (r.values for r in answer.readings)
    return any(isinstance(fields()[i].recipe, Gpm) for given in values for i in given)


def _judge_fields(
    model: str,
    missing: Sequence[str],
    wanted: int,
    advice: str = "nothing to fix: they have no series on it, the others do",
) -> list[Finding]:
    if not wanted:
        return [ok("counters", "none wanted (-f none)")]
    if not missing:
        return [ok("counters", f"{model or 'the GPU'} gives all {wanted}")]
    return [
        note(
            "counters",
            f"{model or 'the GPU'} does not give {len(missing)} of {wanted}: {_listed(missing)}",
            advice,
        )
    ]


def _judge_gpm(model: str, has_gpm: bool, missing: Sequence[str]) -> Finding:
    if has_gpm:
        return ok(_PROFILING, f"{model}: GPM works, so DCGM_FI_PROF_* need no DCGM")
    if not missing:
        return ok(_PROFILING, f"{model}: no GPM, and no counter that needs it")
    return note(
        _PROFILING,
        f"{model}: no GPM, so these have no series: {_listed(missing)}",
        "GPM came with Hopper; on older GPUs only DCGM has these figures: keep a dcgm-exporter for them, or leave them"
        " out (-f)",
    )


def _listed(names: Sequence[str]) -> str:
    return few_of(names, _MOST_NAMES)
