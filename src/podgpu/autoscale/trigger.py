"""This module reads what a ScaledObject's trigger asks for, key by key, and refuses what it does not know: a misspelt
key would scale somebody's pods by something else than they wrote. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from podgpu.autoscale.metrics import (
    MEAN,
    UTILIZATION,
    Metric,
    metric_named,
    parse_aggregate,
    parse_target,
    parse_window,
)
from podgpu.autoscale.questions import DEFAULT_IDLE, DEFAULT_WINDOW, Over, Whom
from podgpu.autoscale.refusal import bad_request, did_you_mean, nearest, quoted
from podgpu.autoscale.selectors import parse_selector

KEYS = ("metric", "target", "owner", "selector", "scope", "window", "aggregate", "idleFor", "missing")
_KEDAS = frozenset({"scaleraddress", "enabletls", "unsafessl", "tlscertfile"})
"""Of KEDA's own, in small letters: it hands on every key of the trigger."""
_SYNONYMS = {
    **dict.fromkeys(("targetvalue", "threshold", "value", "targetutilization"), "target"),
    **dict.fromkeys(("metricname", "name", "query"), "metric"),
    **dict.fromkeys(("deployment", "statefulset", "workload", "targetref", "scaletargetref"), "owner"),
    **dict.fromkeys(("labelselector", "labels", "podselector", "matchlabels"), "selector"),
    **dict.fromkeys(("idle", "idleseconds", "idleafter", "cooldown", "cooldownperiod"), "idleFor"),
    **dict.fromkeys(("aggregation", "function", "statistic"), "aggregate"),
    **dict.fromkeys(("period", "timewindow", "range"), "window"),
}
_FROM_ENV = "FromEnv"
OWNER_KINDS = ("Deployment", "StatefulSet", "ReplicaSet", "DaemonSet", "Job", "ReplicationController")
"""Kubernetes' own; others (a Rollout, a notebook) make pods too, and are taken as they are written."""
_MOST_KEYS = 64


@dataclass(frozen=True, slots=True)
class Trigger:
    metric: Metric
    target: float
    whom: Whom
    over: Over


def parse_trigger(namespace: str, metadata: Mapping[str, str], longest_window: float) -> Trigger:
    """`metadata`: as KEDA hands it on. Raises Refusal."""
    given = _known_keys(metadata)
    if not given.get("target"):
        raise bad_request('the trigger\'s metadata has no target: write the figure to keep to, such as target: "60"')
    return Trigger(
        metric_named(given["metric"]) if "metric" in given else UTILIZATION,
        parse_target(given["target"]),
        _whom(namespace, given),
        parse_over(given, longest_window),
    )


def parse_over(given: Mapping[str, str], longest_window: float) -> Over:
    """Of the keys window, aggregate, missing and idleFor; those that are not there are as usual. Raises Refusal."""
    return Over(
        parse_window(given["window"], "window", longest_window) if "window" in given else DEFAULT_WINDOW,
        parse_aggregate(given["aggregate"]) if "aggregate" in given else MEAN,
        _leaves_out(given.get("missing", "refuse")),
        parse_window(given["idleFor"], "idleFor", _LONGEST_IDLE) if "idleFor" in given else DEFAULT_IDLE,
    )


_LONGEST_IDLE = 86_400.0


def check_key(key: str, known: tuple[str, ...], where: str) -> None:
    """Raises Refusal that names the key that was probably meant."""
    if key in known:
        return
    meant = _SYNONYMS.get(key.lower(), "")
    if meant not in known:
        meant = nearest(key, known)
    hint = f": did you mean {meant}?" if meant else did_you_mean(key, known)
    raise bad_request(f"{where} has a key {quoted(key)} that podgpu does not know{hint}")


def _known_keys(metadata: Mapping[str, str]) -> dict[str, str]:
    """Without KEDA's own. Of `targetFromEnv` KEDA has put the variable's value in already."""
    if len(metadata) > _MOST_KEYS:
        raise bad_request(f"the trigger's metadata has more than {_MOST_KEYS} keys")
    given: dict[str, str] = {}
    for written, value in metadata.items():
        key = written.removesuffix(_FROM_ENV)
        if key.lower() in _KEDAS:
            continue
        check_key(key, KEYS, "the trigger's metadata")
        if key in given:
            raise bad_request(f"the trigger's metadata has both {key} and {key}{_FROM_ENV}: keep one")
        given[key] = value.strip()
    return given


def _whom(namespace: str, given: Mapping[str, str]) -> Whom:
    if not namespace:
        raise bad_request("the request names no namespace: KEDA sends the ScaledObject's")
    chosen = [key for key in ("owner", "selector", "scope") if given.get(key)]
    if len(chosen) != 1:
        has = " and ".join(chosen) or "neither"
        raise bad_request(
            f"the trigger's metadata has {has} of owner, selector and scope: give exactly one, such as "
            "owner: Deployment/inference, selector: app=inference, or scope: namespace"
        )
    return _CHOICES[chosen[0]](namespace, given[chosen[0]])


def _by_owner(namespace: str, text: str) -> Whom:
    kind, slash, name = text.partition("/")
    if not slash or not kind or not name or "/" in name:
        raise bad_request(f"owner {quoted(text)}: write KIND/NAME, such as Deployment/inference")
    return Whom(namespace, owner=(owner_kind(kind), name))


def owner_kind(text: str) -> str:
    """As Kubernetes writes it."""
    by_lower = {kind.lower(): kind for kind in OWNER_KINDS}
    return by_lower.get(text.lower(), text)


def _by_selector(namespace: str, text: str) -> Whom:
    selector = parse_selector(text)
    return Whom(namespace, selector=selector)


def _by_scope(namespace: str, text: str) -> Whom:
    if text not in ("namespace", "cluster"):
        raise bad_request(f"scope {quoted(text)}: write namespace or cluster")
    return Whom(namespace if text == "namespace" else "")


_CHOICES: Mapping[str, Callable[[str, str], Whom]] = {
    "owner": _by_owner,
    "selector": _by_selector,
    "scope": _by_scope,
}


def _leaves_out(text: str) -> bool:
    if text not in ("refuse", "leave-out"):
        raise bad_request(f"missing {quoted(text)}: write refuse, or leave-out to go by the pods that have figures")
    return text == "leave-out"
