"""Says what the page cannot show yet, and which setting adds it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from podgpu.model import NodeState, all_devices, list_pod_names


class SetupHint(msgspec.Struct, frozen=True):
    """One line of the page. `missing`: prices, owners, labels, history or queue."""

    missing: str
    says: str
    do: str


OWNERS_HINT = SetupHint(
    "owners",
    "The owners of pods (Deployment, Job, …) are not read.",
    "podgpu cluster --owners=api (chart: cluster.podOwners=true)",
)
QUEUE_HINT = SetupHint(
    "queue",
    "Pods that wait for GPUs are not read.",
    "podgpu cluster --queue (chart: cluster.queue=true)",
)


def hint_history(note: str) -> SetupHint:
    """`note`: why a history on disk does not last, and what to do. Empty: it is in memory."""
    if note:
        says, _, do = note.partition(": ")
        return SetupHint("history", f"The history does not last: {says}.", do)

    return SetupHint(
        "history",
        "The history is in memory, and is lost at a restart.",
        "podgpu cluster --history-dir=DIR (chart: cluster.historyDir=claim)",
    )


def hint_prices(source: str) -> Iterable[SetupHint]:
    """`source`: where the prices come from. Yields nothing if they are the user's own."""
    if source == "example":
        says = "The prices are examples."
        do = "--prices=FILE (chart: cluster.prices)"
        yield SetupHint("prices", says, do)
    elif not source:
        says = "There are no prices, so no cost is shown."
        do = "--prices=FILE, or --prices=example to try it out (chart: cluster.prices)"
        yield SetupHint("prices", says, do)


def _has_pods(state: NodeState) -> bool:
    return any(list_pod_names(device.holders) for _, device in all_devices(state))


def hint_labels(states: Iterable[NodeState]) -> Iterable[SetupHint]:
    """Yields a hint if no exporter reads labels, so that cost by team is not known."""
    ours = [state for state in states if state.producer == "podgpu"]
    have_labels = any(state.pod_labels for state in ours)
    if not have_labels and any(map(_has_pods, ours)):
        yield SetupHint(
            "labels",
            "The labels of pods are not read, so there is no cost by team.",
            "podgpu exporter --kubernetes-enable-pod-labels (chart: "
            "exporter.kubernetes.podLabels.enabled=true)",
        )
