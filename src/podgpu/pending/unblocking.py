"""Finds the idle pods that could make room for a pending pod."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from podgpu.model import PodName
from podgpu.pending.cluster_index import CandidateNode, ClusterIndex
from podgpu.pending.cluster_objects import BoundPod
from podgpu.pending.device_supply import Taken
from podgpu.pending.idle_pods import IdlePod
from podgpu.pending.node_checks import Check, Wish, check_node

_MAX_OPTIONS = 3
_MAX_NODES = 20  # that are searched for one pod
_BUSY = frozenset({"in_use", "other_in_use"})


class Unblock(NamedTuple):
    """If all these pods ended, the pod would fit on the node."""

    node: str
    pods: tuple[IdlePod, ...]


@dataclass(frozen=True)
class UnblockingSearch:
    cluster: ClusterIndex
    idle: Mapping[PodName, IdlePod]

    def find(self, wish: Wish, checks: Iterable[Check]) -> list[Unblock]:
        if not self.idle:
            return []

        options = []
        tried = 0
        for check in checks:
            if tried == _MAX_NODES:
                break
            # Ended pods do not help if anything else excludes the node.
            if not all(failure.key in _BUSY for failure in check.failures):
                continue

            idle = [each for each in check.candidate.pods if each.key in self.idle]
            if not idle:
                continue

            tried += 1
            ended = self._find_fewest(wish, check.candidate, idle)
            if ended:
                pods = tuple(self.idle[each.key] for each in ended)
                options.append(Unblock(check.candidate.node.name, pods))

        options.sort(key=lambda option: (len(option.pods), option.pods[0].idle_since))
        return options[:_MAX_OPTIONS]

    def _find_fewest(
        self, wish: Wish, candidate: CandidateNode, idle: Sequence[BoundPod]
    ) -> list[BoundPod]:
        """Returns idle pods without which the pod would fit: those that are idle for longest."""
        ended = sorted(idle, key=lambda each: (self.idle[each.key].idle_since, each.key))
        if not self._fits_without(wish, candidate, ended):
            return []

        # Spares those that became idle last, if the others suffice.
        for each in reversed(ended):
            fewer = [other for other in ended if other is not each]
            if self._fits_without(wish, candidate, fewer):
                ended = fewer

        return ended

    def _fits_without(
        self, wish: Wish, candidate: CandidateNode, ended: Sequence[BoundPod]
    ) -> bool:
        uids = {each.uid for each in ended}
        remaining = [each for each in candidate.pods if each.uid not in uids]
        later = CandidateNode(candidate.node, remaining)
        taken = self._take_back(uids)
        check = check_node(self.cluster, wish, later, taken)
        return not check.failures

    def _take_back(self, uids: set[str]) -> Taken:
        """Returns what is taken of the devices when these pods have ended."""
        taken = dict(self.cluster.devices.taken)
        for uid in uids:
            for claim in self.cluster.claims_of.get(uid, ()):
                # A claim is free when none of its pods is left.
                if not uids.issuperset(claim.users):
                    continue
                for held in claim.devices:
                    held_by_all = taken[held.device]
                    taken[held.device] = [each for each in held_by_all if each is not held]

        return taken
