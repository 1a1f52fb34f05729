"""The reasons why a pod is pending: keys and numbers, and the only place that makes texts of them.

A reason is about nodes that offer the requested GPUs. Each of these nodes counts in exactly one
reason of a pod: the first one of `STAGES` that excludes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import msgspec

from podgpu.errors import MOST_NAMED, few_of, plural

STAGES = (
    "selector",
    "claim_node",
    "too_large",
    "other_too_large",
    "not_ready",
    "cordoned",
    "taint",
    "in_use",
    "fragmented",
    "nominated",
    "other_in_use",
)
UNCHECKED = {
    "pod_affinity": "affinity to other pods",
    "topology_spread": "topology spread constraints",
    "volumes": "volumes",
    "host_ports": "host ports",
    "dra_selector": "selectors or constraints of its claims",
    "gang": "gang scheduling (whether all pods of its group fit together)",
    "scheduler": "rules of its own scheduler",
}
"""Constraint of a pod -> its name in texts."""
_LEAST_SHOWN = 0.01  # less would be written as 0
_MOST_NAMES = MOST_NAMED + 1  # as many as `few_of` shows
_SIZES = (("GiB", 1024**3), ("MiB", 1024**2))


class Reason(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Amounts are in GPUs, cores, bytes, or units of another resource."""

    key: str
    resource: str = ""
    needed: float | None = None
    free: float | None = None  # on all nodes of this reason
    largest: float | None = None  # on one node: free, or if it is too large, in total
    total: float | None = None  # on all nodes of this reason, whoever holds it
    # GPUs on these nodes that Kubernetes gives to no pod; not in `total`
    unhealthy: float | None = None
    nodes: int | None = None
    names: tuple[str, ...] = ()  # what they name depends on the key: see its text below
    unnamed: int = 0  # number of further names
    # The pod would fit now on one of these nodes if only this reason did not exist.
    alone: bool = False


def number(value: float | None) -> str:
    if value is None:
        return "an unknown number of"
    if 0 < value < _LEAST_SHOWN:
        return f"less than {_LEAST_SHOWN}"
    return f"{value:,.2f}".rstrip("0").rstrip(".")


def amount(value: float | None, resource: str) -> str:
    """Returns an amount with its unit: `2 nvidia.com/gpu`, `1.5 CPUs`, `16 GiB of memory`."""
    if resource == "cpu":
        unit = "CPU" if value == 1 else "CPUs"
        return f"{number(value)} {unit}"
    if resource in ("memory", "ephemeral-storage") or resource.startswith("hugepages-"):
        return f"{_size(value)} of {resource}"

    if resource == "pods":
        unit = "pod slot" if value == 1 else "pod slots"
        return f"{number(value)} {unit}"
    if resource == "gpu-memory":
        return f"{_size(value)} of GPU memory"

    return f"{number(value)} {resource}"


def _size(value: float | None) -> str:
    """Returns bytes in GiB. A size of less than 0.01 GiB, such as a typo, is not shown as 0."""
    if value is None:
        return "an unknown amount"
    if not value:
        return "0 GiB"

    for unit, size in _SIZES:
        if value >= size / 100:
            return f"{number(value / size)} {unit}"

    unit = "byte" if value == 1 else "bytes"
    return f"{number(value)} {unit}"


class CutNames(NamedTuple):
    shown: tuple[str, ...]
    unnamed: int  # number of the others


def cut_names(names: Iterable[str]) -> CutNames:
    """Cuts names that users choose, such as taints, so that a reason has a bounded size."""
    distinct = tuple(dict.fromkeys(names))
    shown = distinct[:_MOST_NAMES]
    return CutNames(shown, len(distinct) - len(shown))


def _names(reason: Reason) -> str:
    return few_of(reason.names, unnamed=reason.unnamed)


def _nodes(reason: Reason) -> str:
    return plural(reason.nodes or 0, "node")


def _free_there(reason: Reason) -> str:
    if not reason.free:
        return f"{_nodes(reason)} without a free {reason.resource}"
    return f"{amount(reason.free, reason.resource)} free on {_nodes(reason)}"


def _say_in_use(reason: Reason) -> str:
    needed = amount(reason.needed, reason.resource)
    free = f"{number(reason.free)} of {number(reason.total)}"
    verb = "are"
    if reason.free == 1:
        verb = "is"

    where = "node"
    if reason.nodes != 1:
        where = _nodes(reason)

    return f"It needs {needed}; {free} {verb} free on the {where} that it may use."


def _say_fragmented(reason: Reason) -> str:
    needed = amount(reason.needed, reason.resource)
    free = number(reason.free)
    largest = number(reason.largest)
    return (
        f"It needs {needed} on one node. {free} are free, but spread over nodes:"
        f" at most {largest} on one of {_nodes(reason)}."
    )


def _largest_of(reason: Reason) -> str:
    return "the node" if reason.nodes == 1 else f"the largest of {_nodes(reason)}"


def _say_too_large(reason: Reason) -> str:
    needed = amount(reason.needed, reason.resource)
    return f"It needs {needed} on one node; {_largest_of(reason)} has {number(reason.largest)}."


def _say_other_too_large(reason: Reason) -> str:
    needed = amount(reason.needed, reason.resource)
    largest = amount(reason.largest, reason.resource)
    return f"It needs {needed}; {_largest_of(reason)} with such GPUs has {largest}."


def _say_other_in_use(reason: Reason) -> str:
    needed = amount(reason.needed, reason.resource)
    largest = amount(reason.largest, reason.resource)
    verb = "has" if reason.nodes == 1 else "have"
    return (
        f"It needs {needed}; {_nodes(reason)} with enough free GPUs {verb} at most {largest} left."
    )


def _say_not_offered(reason: Reason) -> str:
    text = f"No node offers {reason.resource}."
    if reason.names:
        text += f" Nodes offer {_names(reason)}."
    return text


def _say_no_device(reason: Reason) -> str:
    return f"No device of {reason.resource} matches its claim: {_names(reason)}."


def _say_selector(reason: Reason) -> str:
    requires = f"it requires {_names(reason)}"
    if not reason.names:
        requires = "a term without requirements accepts no node"
    return f"Its node selector or affinity excludes {_free_there(reason)}: {requires}."


def _say_starting(reason: Reason) -> str:
    # `_find_obstacle` puts the node before what the pod waits for.
    node, *waiting = reason.names
    text = f"It has its place on {node} and is starting"
    if waiting:
        text += f": {few_of(waiting, unnamed=reason.unnamed)}"
    return f"{text}."


def _say_unchecked(reason: Reason) -> str:
    names = few_of(UNCHECKED.get(name, name) for name in reason.names)
    if not reason.nodes:
        return f"podgpu cannot check {names}: see what the scheduler says."

    return (
        f"Its GPUs, CPU and memory are free on {_nodes(reason)}. podgpu does not check {names}:"
        " see what the scheduler says."
    )


def _say_quota(reason: Reason) -> str:
    needed = amount(reason.needed, reason.resource)
    return (
        f"{_names(reason)} allows {amount(reason.total, reason.resource)}, of which"
        f" {number(reason.free)} are left. It needs {needed}."
    )


def _say_preempting(reason: Reason) -> str:
    return (
        f"It will run on {_names(reason)}: pods with a lower priority are ended there to make room."
    )


def _say_nominated(reason: Reason) -> str:
    text = (
        f"{_free_there(reason)}, but kept for pods of the same or a higher priority"
        " that wait for the rest."
    )
    # The amount may be "less than 0.01".
    return text.capitalize()


class _Wording(NamedTuple):
    say: Callable[[Reason], str]
    do: str = ""  # empty if there is nothing to do but wait


_WORDINGS: Mapping[str, _Wording] = {
    "fits": _Wording(
        lambda reason: f"It would fit now on {_nodes(reason)}.",
        do="The scheduler tries again after a change, or within 5 minutes.",
    ),
    "unchecked": _Wording(_say_unchecked),
    "unseen": _Wording(
        lambda reason: f"No scheduler named {_names(reason)} has looked at it.",
        do="Check schedulerName, and that this scheduler runs.",
    ),
    "starting": _Wording(_say_starting),
    "gated": _Wording(
        lambda reason: f"It is held back by the scheduling gate {_names(reason)}.",
        do="The controller that set the gate removes it.",
    ),
    "quota": _Wording(
        _say_quota, do="Request less, raise the quota, or wait until others have ended."
    ),
    "queued": _Wording(
        lambda reason: f"{_names(reason)} has quota left, and Kueue has not admitted it yet.",
        do="See what Kueue says.",
    ),
    "queue_missing": _Wording(
        lambda reason: (
            f"Its queue {_names(reason)}, or the ClusterQueue of this queue, does not exist."
        ),
        do="Correct the label kueue.x-k8s.io/queue-name, or create the queue.",
    ),
    "claim_missing": _Wording(
        lambda reason: f"Its ResourceClaim {_names(reason)} does not exist.", do="Create the claim."
    ),
    "claim_not_created": _Wording(
        lambda reason: (
            f"No ResourceClaim has been created from its ResourceClaimTemplate {_names(reason)}."
        ),
        do="Check that the template exists, and see the events of the pod.",
    ),
    "class_missing": _Wording(
        lambda reason: f"Its claim names the DeviceClass {_names(reason)}, which does not exist.",
        do="Create the DeviceClass, or correct the claim.",
    ),
    "preempting": _Wording(_say_preempting),
    "not_offered": _Wording(
        _say_not_offered,
        do="Correct the name, or check the device plugin or DRA driver of the nodes.",
    ),
    "no_nodes": _Wording(lambda reason: "The cluster has no nodes.", do="Add nodes with GPUs."),
    "no_device": _Wording(
        _say_no_device, do="Change the selectors of the claim, or wait for such a device."
    ),
    "selector": _Wording(_say_selector, do="Change the selector, or wait for a node of this kind."),
    "claim_node": _Wording(
        lambda reason: (
            f"Its ResourceClaim {_names(reason)} has a device elsewhere, which excludes"
            f" {_free_there(reason)}."
        )
    ),
    "too_large": _Wording(_say_too_large, do="Request fewer, or use several pods."),
    "other_too_large": _Wording(_say_other_too_large, do="Request less of it."),
    "not_ready": _Wording(
        lambda reason: f"Nodes that are not ready: {_free_there(reason)}.", do="Repair the nodes."
    ),
    "cordoned": _Wording(
        lambda reason: f"Cordoned nodes: {_free_there(reason)}.",
        do="kubectl uncordon, when the maintenance has ended.",
    ),
    "taint": _Wording(
        lambda reason: f"It does not tolerate the taint {_names(reason)}: {_free_there(reason)}.",
        do="Add a toleration, if the pod may run there.",
    ),
    "in_use": _Wording(_say_in_use),
    "fragmented": _Wording(
        _say_fragmented, do="Request fewer per pod, or let pods end that hold a part of a node."
    ),
    "nominated": _Wording(_say_nominated),
    "other_in_use": _Wording(_say_other_in_use, do="Request less of it per GPU."),
    "ending": _Wording(
        lambda reason: (
            f"{amount(reason.free, reason.resource)} will become free,"
            " because pods there are ending."
        )
    ),
    "never_preempts": _Wording(
        lambda reason: (
            f"Pods with a lower priority hold {amount(reason.free, reason.resource)}, but its"
            " preemptionPolicy is Never."
        ),
        do="Use a PriorityClass that preempts.",
    ),
    "no_gpu": _Wording(lambda reason: "It requests no GPU."),
    "many": _Wording(
        lambda reason: (
            f"Not explained: there are more than {number(reason.total)} different pending pods."
        )
    ),
}


def describe(reason: Reason) -> str:
    text = _WORDINGS[reason.key].say(reason)
    if reason.unhealthy:
        more = "" if reason.key == "not_offered" else " more"
        text += f" Kubernetes calls {number(reason.unhealthy)}{more} unhealthy."
    return text


def advise(reason: Reason) -> str:
    """Returns what to do. Empty if there is nothing to do but wait."""
    advice = _WORDINGS[reason.key].do
    if not reason.unhealthy:
        return advice

    text = "Repair the unhealthy GPUs."
    if advice:
        text += f" Otherwise: {advice[0].lower()}{advice[1:]}"
    return text
