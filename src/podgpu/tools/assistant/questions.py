"""The questions that an assistant can ask a view. Each method is a tool of `podgpu mcp`.

The names, docstrings and descriptions of the parameters are what the assistant sees.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from podgpu.clock import parse_moment
from podgpu.errors import UsageError, utc_text
from podgpu.fleet.view import GpuView, HolderView, NodeView, PodResponse, View
from podgpu.metrics.conditions import breaks_gpu
from podgpu.tools.assistant.untrusted import make_rows, wrap
from podgpu.view_address import ViewClient, read_answer

# The view's clock may be ahead of ours by so many seconds. If it is not, the view rejects the time.
_CLOCK_ERROR = 300.0
Answer = dict[str, Any]
Row = dict[str, Any]
State = Literal["", "held", "free", "used", "idle", "broken"]

Namespace = Annotated[str, Field(description="Kubernetes namespace of the pod.")]
Pod = Annotated[str, Field(description="Name of the pod.")]
OnlyNamespace = Annotated[
    str, Field(description="(Optional) only this Kubernetes namespace. Without it: all.")
]
OnlyNode = Annotated[str, Field(description="(Optional) only this node. Without it: all nodes.")]
Range = Annotated[
    str,
    Field(description="(Optional) period that ends now, such as 1h, 24h, 7d or 30d. Default: 24h."),
]
GroupBy = Annotated[
    str,
    Field(
        description="(Optional) one row per pod, owner (Deployment, Job, …), namespace, model (of"
        " LLM engines) or label:NAME. Default: owner."
    ),
]
Moment = Annotated[
    str,
    Field(
        description=(
            "Time as ISO 8601, such as 2026-11-19T14:30:00Z, as Unix seconds, or an age such as 2d."
        )
    ),
]
OptionalMoment = Annotated[
    str,
    Field(
        description="(Optional) time as ISO 8601 or Unix seconds. Without it: `range` before now."
    ),
]


class Questions:
    """Reads the JSON API of one view."""

    def __init__(self, client: ViewClient) -> None:
        self._client = client

    def gpu_overview(self) -> Answer:
        """Counts the GPUs now: all, allocated, free, used, idle, broken, wasted, with cost per
        hour, in total and for the 20 namespaces with most GPUs. Start here.
        """
        view = self._read_view()
        namespaces = sorted(view.namespaces, key=lambda row: row.allocated_gpus, reverse=True)
        data = _describe_view(view)
        data["namespaces"] = make_rows([msgspec.to_builtins(row) for row in namespaces])
        return wrap(data)

    def gpus_list(
        self,
        state: Annotated[
            State,
            Field(
                description="(Optional) held (by a pod), free, used, idle (held, but nothing"
                " runs) or broken. Without it: all GPUs."
            ),
        ] = "",
        node: OnlyNode = "",
        model: Annotated[
            str, Field(description="(Optional) text in the name of the model, such as H100.")
        ] = "",
        namespace: OnlyNamespace = "",
    ) -> Answer:
        """Lists GPUs now, with holders, use, memory and problems. `uuid` is for gpu_get."""
        query = {"state": state, "node": node, "ns": namespace}
        return self._list_gpus(query, model)

    def gpu_get(
        self,
        uuid: Annotated[str, Field(description="UUID of the GPU, such as GPU-5d1c…")],
        field: Annotated[
            str,
            Field(
                description="(Optional) only DCGM fields with this text in their name, such as"
                " TEMP. Without it: the first 20."
            ),
        ] = "",
    ) -> Answer:
        """Gets everything about one GPU: holders, XID errors, conditions with what to do, how usage
        is measured, and its DCGM fields. Read from the GPU's exporter.
        """
        answer = self._read(f"api/v1/gpus/{_part(uuid)}")
        sources = answer.pop("sources", [])
        answer["failed_sources"] = [source for source in sources if not source.get("ok")]
        fields = answer.pop("fields", [])
        answer["fields"] = make_rows([row for row in fields if field.upper() in row["name"]])
        return wrap(answer)

    def pod_gpus(self, namespace: Namespace, pod: Pod) -> Answer:
        """Gets the GPUs that one pod holds now, and how it uses them: utilisation, memory, power,
        waiting for others, idle time, cost.
        """
        path = f"api/v1/pods/{_part(namespace)}/{_part(pod)}"
        answer = read_answer(self._client, path, PodResponse)
        # The rows replace the nodes.
        data = msgspec.to_builtins(answer)
        del data["nodes"]
        rows = []
        for of_node in answer.nodes:
            rows += [_make_gpu_row(of_node, gpu) for gpu in of_node.gpus]

        return wrap(data | make_rows(rows))

    def pod_summary(self, namespace: Namespace, pod: Pod) -> Answer:
        """Sums up a running or ended pod from the history: GPU-hours, idle hours, energy, cost,
        mean and highest use, what slowed it down, and a hint.
        """
        return wrap(self._read(f"api/v1/summary/{_part(namespace)}/{_part(pod)}"))

    def waste_list(self, range: Range = "24h", by: GroupBy = "owner") -> Answer:
        """Lists who wasted most in a period: hours and cost of idle GPUs and of unused parts of
        shares, the largest first.
        """
        return wrap(_with_rows(self._read("api/v1/waste", {"range": range, "by": by})))

    def cost_range(
        self,
        range: Range = "24h",
        by: GroupBy = "owner",
        start: OptionalMoment = "",
        end: OptionalMoment = "",
    ) -> Answer:
        """Lists cost, GPU-hours and energy of a period, the most expensive first. The totals
        include GPUs that nobody had allocated (`unallocated_cost`).
        """
        query = {"by": by}
        if start:
            query["from"] = _parse_moment(start)
        else:
            query["range"] = range

        if end:
            query["to"] = _parse_moment(end)

        return wrap(_with_rows(self._read("api/v1/range", query)))

    def events_list(
        self,
        range: Range = "24h",
        gpu: Annotated[str, Field(description="(Optional) UUID of a GPU.")] = "",
        node: Annotated[str, Field(description="(Optional) name of a node.")] = "",
        pod: Annotated[str, Field(description="(Optional) NAMESPACE/POD.")] = "",
        kind: Annotated[
            str,
            Field(
                description="(Optional) started, ended, idle, recovered, or a condition such as xid"
                " or lost. Without it: all."
            ),
        ] = "",
    ) -> Answer:
        """Lists events from the history, the newest first: errors, lost and recovered GPUs, pods
        that started or ended, idle alarms. Give at most one of gpu, node and pod.
        """
        query = _select_given({"range": range, "gpu": gpu, "node": node, "pod": pod})
        answer = self._read("api/v1/events", query)
        events = answer.pop("events")
        if kind:
            events = [event for event in events if event["kind"] == kind]
        return wrap(answer | make_rows(events))

    def state_at(self, at: Moment, node: OnlyNode = "", namespace: OnlyNamespace = "") -> Answer:
        """Shows the GPUs and their holders at a past time, from the history."""
        query = {"at": _parse_moment(at), "node": node, "ns": namespace}
        return self._list_gpus(query)

    def who_waits(self, namespace: OnlyNamespace = "") -> Answer:
        """Lists containers that wait now for others on a shared GPU, the longest wait first, and
        for whom. Only GPUs on which podgpu measures context switches.
        """
        view = self._read_view(_select_given({"ns": namespace}))
        waiting = []
        for of_node, gpu in _list_gpus(view):
            for instance, holder in _list_holders(gpu):
                is_shown = not namespace or holder.namespace == namespace
                if is_shown and holder.wait_ratio:
                    row = _make_holder_row(instance, holder)
                    row |= {"node": of_node.name, "uuid": gpu.uuid}
                    row["waits_for"] = [msgspec.to_builtins(other) for other in holder.waits_for]
                    waiting.append(row)

        waiting.sort(key=itemgetter("wait_ratio"), reverse=True)
        return wrap(_describe_list(view, waiting))

    def problems_list(self) -> Answer:
        """Lists what is wrong now, the most serious first: broken and lost GPUs, nodes that do not
        answer, failing sources, each with what to do.
        """
        view = self._read_view({"state": "broken"})
        advice: dict[str, list[str]] = defaultdict(list)  # UUID or node -> what to do
        for of_node, gpu in _list_gpus(view):
            for condition in gpu.conditions:
                advice[gpu.uuid].append(condition.do)
                advice[of_node.name].append(condition.do)

        rows = []
        for alert in view.alerts:
            row = msgspec.to_builtins(alert)
            place = alert.uuid or alert.node
            row["do"] = list(dict.fromkeys(advice[place]))  # without repetitions
            rows.append(row)

        return wrap(_describe_list(view, rows))

    def _list_gpus(self, query: Mapping[str, str], model: str = "") -> Answer:
        """Selects the GPUs here too: a server that reads all GPUs answers with all of them."""
        view = self._read_view(_select_given(query))
        rows = []
        for node, gpu in _list_gpus(view):
            if _is_selected(node, gpu, query, model):
                rows.append(_make_gpu_row(node, gpu))
        return wrap(_describe_list(view, rows))

    def _read_view(self, query: Mapping[str, str] | None = None) -> View:
        return read_answer(self._client, "api/v1/view", View, query)

    def _read(self, path: str, query: Mapping[str, str] | None = None) -> Answer:
        return read_answer(self._client, path, dict[str, Any], query)


def _part(name: str) -> str:
    """Returns a part of a path. Raises UsageError if it would be another path."""
    if not name or "/" in name or name in (".", ".."):
        raise UsageError(f"{name[:80]!a} is not the name of one object")
    return name


def _parse_moment(text: str) -> str:
    """Returns Unix seconds as text."""
    now = time.time()
    moment = parse_moment(text, now, needs_zone=True)
    # The view would reject it as a Unix time, which the assistant did not write.
    if moment > now + _CLOCK_ERROR:
        raise UsageError(f"{text[:80]!a} is in the future: it is {utc_text(now)}")
    return str(moment)


# Views


_VIEW_KEYS = ("taken_at", "at", "step_seconds", "simulated", "currency", "prices", "totals")


def _describe_view(view: View) -> Answer:
    """Returns what a view says about all GPUs."""
    data = _select(view, _VIEW_KEYS)
    # problems_list has the alerts.
    alerts = {alert.text for alert in view.alerts}
    data["problems"] = len(view.alerts)
    data["notes"] = [note for note in view.notes if note not in alerts]
    return data


def _describe_list(view: View, rows: Sequence[Row]) -> Answer:
    data = _describe_view(view)
    if view.paged:
        data["notes"].append("there are too many GPUs to read all: these are those of one page")
    return data | make_rows(rows)


def _with_rows(answer: Answer) -> Answer:
    """Keeps only the first rows of an answer of the API, and adds the number of all."""
    return answer | make_rows(answer["rows"])


def _list_gpus(view: View) -> Iterator[tuple[NodeView, GpuView]]:
    for node in view.nodes:
        for gpu in node.gpus:
            yield node, gpu


def _list_holders(gpu: GpuView) -> Iterator[tuple[str, HolderView]]:
    """Yields the holders of a GPU, and of its MIG instances with the instance's id."""
    for holder in gpu.holders:
        yield "", holder
    for instance in gpu.instances:
        for holder in instance.holders:
            yield instance.id, holder


def _find_states(gpu: GpuView) -> set[str]:
    holders = [holder for _, holder in _list_holders(gpu)]
    states = {str(holder.use) for holder in holders}
    if holders:
        states.add("held")
    elif not gpu.absent:
        states.add("free")

    if any(breaks_gpu(condition.condition) for condition in gpu.conditions):
        states.add("broken")

    return states


def _is_selected(node: NodeView, gpu: GpuView, query: Mapping[str, str], model: str) -> bool:
    if query["node"] and query["node"] != node.name:
        return False
    if model.lower() not in gpu.model.lower():
        return False
    # Not all questions have a state.
    state = query.get("state")
    if state and state not in _find_states(gpu):
        return False
    if not query["ns"]:
        return True
    return query["ns"] in {holder.namespace for _, holder in _list_holders(gpu)}


_GPU_KEYS = (
    "uuid",
    "index",
    "model",
    "absent",
    "utilization_ratio",
    "memory_used_bytes",
    "memory_total_bytes",
    "power_watts",
    "temperature_celsius",
    "last_holders",
)


def _make_gpu_row(node: NodeView, gpu: GpuView) -> Row:
    row: Row = {"node": node.name}
    if node.cluster:
        row["cluster"] = node.cluster
    if node.old:
        row["old"] = True

    row |= _select(gpu, _GPU_KEYS)
    if gpu.conditions:
        row["conditions"] = [condition.condition for condition in gpu.conditions]
    if gpu.instances:
        row["instances"] = [f"{instance.id}: {instance.profile}" for instance in gpu.instances]

    row["holders"] = []
    for instance, holder in _list_holders(gpu):
        row["holders"].append(_make_holder_row(instance, holder))
    return row


def _select_given(query: Mapping[str, str]) -> dict[str, str]:
    """Leaves out the parameters that the caller did not give."""
    return {name: text for name, text in query.items() if text}


def _select(view: msgspec.Struct, keys: Iterable[str]) -> Row:
    """Returns the members that are known."""
    whole = msgspec.to_builtins(view)
    return {key: whole[key] for key in keys if key in whole}


_HOLDER_KEYS = (
    "namespace",
    "pod",
    "container",
    "job",
    "user",
    "owner",
    "hidden",
    "share_ratio",
    "part",
    "use",
    "unknown_because",
    "utilization_ratio",
    "memory_used_bytes",
    "power_watts",
    "wait_ratio",
    "wait_seconds",
    "idle_since",
    "cost_per_hour",
)


def _make_holder_row(instance: str, holder: HolderView) -> Row:
    row = {"instance": instance} if instance else {}
    return row | _select(holder, _HOLDER_KEYS)
