"""Reads the tokens of LLM engines in a range from Prometheus, one query per engine.

The series have the labels `namespace` and `pod` of their target. podgpu adds them to the usage of
the GPUs that the pod held.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from podgpu.charge import Amounts, Tokens
from podgpu.metrics.engines import (
    MOST_TOKENS,
    RANK_LABELS,
    Engine,
    EngineFamily,
    clean_model,
    engines,
)
from podgpu.metrics.parse import ParsedSample
from podgpu.metrics.promql import by, one_of, quote, select
from podgpu.model import PodName

_KIND = "kind"  # label that says which counter a sample is of
_PREFIX = "tokens of "
ClusterPod = tuple[str, PodName]  # cluster, namespace and pod


@dataclass
class PodTokens:
    """The tokens of a pod in a range, and how long Prometheus had its counters."""

    prompt: float = 0.0
    transferred: float = 0.0
    generated: float = 0.0
    seconds: float = 0.0
    models: set[str] = field(default_factory=set)

    @property
    def tokens(self) -> Tokens:
        return Tokens(max(0.0, self.prompt - self.transferred), self.generated)

    @property
    def model(self) -> str:
        return ", ".join(sorted(self.models))

    def cover(self, amounts: Amounts, held_seconds: float) -> Amounts:
        """Limits the time for which tokens are known to that of the counters."""
        ratio = 0.0
        if held_seconds:
            ratio = min(1.0, self.seconds / held_seconds)
        return amounts._replace(token_seconds=amounts.token_seconds * ratio)


def token_queries(
    cluster_label: str, match: str, window: str, length: int, step: int
) -> dict[str, str]:
    """Returns the query of each engine by name.

    `window`: the range in PromQL. `length`: the range in milliseconds, without its start.
    """
    of_pod = by(cluster_label, "namespace", "pod")
    queries = {}
    for engine in engines():
        keys = (cluster_label, "namespace", "pod", *engine.model)
        counted = _write_increases(engine, keys, match, window)

        series = select((engine.generated.name,), 'pod!=""', match)
        present = f"group {of_pod} ({series})"
        seconds = f"{step} * count_over_time(({present})[{length}ms:{step}s])"
        counted.append(_mark(seconds, "seconds"))
        queries[f"{_PREFIX}{engine.name}"] = " or ".join(counted)

    return queries


def token_step_queries(
    cluster_label: str, match: str, pods: Iterable[str], step: int
) -> dict[str, str]:
    """Returns the query of each engine for the tokens of `step` seconds, as `token_queries`."""
    of_pods = ",".join(filter(None, (one_of("pod", pods), match)))
    keys = (cluster_label, "namespace", "pod")
    queries = {}
    for engine in engines():
        counted = _write_increases(engine, keys, of_pods, f"{step}s")
        queries[f"{_PREFIX}{engine.name}"] = " or ".join(counted)
    return queries


def _write_increases(engine: Engine, keys: tuple[str, ...], match: str, window: str) -> list[str]:
    families = {"prompt": engine.prompt, "generated": engine.generated}
    if engine.transferred is not None:
        families["transferred"] = engine.transferred

    increases = []
    for kind, family in families.items():
        increases.append(_increase(family, kind, keys, match, window))
    return increases


def _increase(
    family: EngineFamily, kind: str, keys: tuple[str, ...], match: str, window: str
) -> str:
    """`max` merges the series of an HA pair and of two monitors, `sum` those of ranks."""
    matcher = ""
    if family.label:
        matcher = f"{family.label}={quote(family.value)}"
    series = select((family.name,), 'pod!=""', matcher, match)
    of_rank = by(*keys, "instance", *RANK_LABELS)
    increase = f"max {of_rank} (increase({series}[{window}]))"
    return _mark(f"sum {by(*keys)} ({increase})", kind)


def _mark(query: str, kind: str) -> str:
    return f'label_replace({query}, "{_KIND}", "{kind}", "", "")'


def read_tokens(
    vectors: Mapping[str, Iterable[ParsedSample]], cluster_label: str
) -> dict[ClusterPod, PodTokens]:
    """Returns the tokens of each pod. Several engines of a pod are added up."""
    pods: dict[ClusterPod, PodTokens] = {}
    for engine in engines():
        for sample in vectors.get(f"{_PREFIX}{engine.name}", ()):
            labels = sample.labels
            cluster = labels.get(cluster_label, "")
            name = labels.get("namespace", ""), labels.get("pod", "")
            pod = pods.setdefault((cluster, name), PodTokens())
            _add(pod, engine, sample)
    return pods


def _add(pod: PodTokens, engine: Engine, sample: ParsedSample) -> None:
    if not 0 <= sample.value <= MOST_TOKENS:
        return

    kind = sample.labels.get(_KIND)
    if kind == "prompt":
        pod.prompt += sample.value
    elif kind == "transferred":
        pod.transferred += sample.value
    elif kind == "generated":
        pod.generated += sample.value
    else:
        # The time of the counters. Engines of a pod run at the same time.
        pod.seconds = max(pod.seconds, sample.value)

    # The first label that has a value names the model.
    for label in engine.model:
        model = clean_model(sample.labels.get(label, ""))
        if model:
            pod.models.add(model)
            break
