"""The commands that repair a broken GPU, for the page, the JSON and `podgpu doctor`."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from podgpu.fleet.choose import find_recovery
from podgpu.metrics.conditions import REPAIRS, find_repair
from podgpu.model import DeviceState, PodName

RELEASE_SECONDS = 600  # enough for a reset; the driver itself needs less than a minute


class RepairCommand(msgspec.Struct, frozen=True):
    place: Literal["terminal", "node"]  # where to run it
    command: str


class Repair(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How to repair a GPU."""

    action: str  # one of `REPAIRS`
    commands: tuple[RepairCommand, ...]
    evicts: tuple[str, ...] = ()  # the pods with GPUs on the node, as NAMESPACE/POD


def repair_of(gpu: DeviceState) -> str:
    """Returns the most drastic repair that the conditions of the GPU need, or an empty string."""
    recovery = find_recovery(gpu)
    wanted = {find_repair(each.name, each.detail, recovery) for each in gpu.conditions}
    for repair in REPAIRS:
        if repair in wanted:
            return repair
    return ""


def make_repair(
    action: str, node: str, gpu: str, *, has_pods: bool, pods: Iterable[PodName] = ()
) -> Repair:
    """`gpu`: index or UUID. `has_pods`: True on a node of Kubernetes. `pods`: those with GPUs on
    the node, which a drain evicts.
    """
    quoted_node = shlex.quote(node)
    quoted_gpu = shlex.quote(gpu)
    commands = _list_commands(action, quoted_node, quoted_gpu, has_pods)
    # Holders without a pod, such as jobs, have empty names.
    evicted = {f"{namespace}/{pod}" for namespace, pod in pods if pod}
    return Repair(action=action, commands=tuple(commands), evicts=tuple(sorted(evicted)))


def _list_commands(action: str, node: str, gpu: str, has_pods: bool) -> Iterator[RepairCommand]:
    drain = f"kubectl drain {node} --ignore-daemonsets --delete-emptydir-data"
    if has_pods:
        yield RepairCommand("terminal", f"kubectl cordon {node}")
        # Lists all pods that the next command evicts, and evicts none.
        yield RepairCommand("terminal", f"{drain} --dry-run=server")
        yield RepairCommand("terminal", drain)

    if action == "reset":
        # A drain leaves DaemonSets, so the exporter still has the driver open.
        release = f"podgpu release --seconds {RELEASE_SECONDS}"
        if has_pods:
            yield RepairCommand("terminal", f"{release} --node {node}")
        else:
            yield RepairCommand("node", release)
        yield RepairCommand("node", f"nvidia-smi -r -i {gpu}")

    if action == "reboot":
        yield RepairCommand("node", "systemctl reboot")
    if action == "replace":
        yield RepairCommand("node", "systemctl poweroff")
    if has_pods:
        yield RepairCommand("terminal", f"kubectl uncordon {node}")
