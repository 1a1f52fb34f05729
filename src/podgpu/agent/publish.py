"""Published is what is handed out: one snapshot, with its families and expositions, made when first asked for. It never
asks the driver."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Literal, TypeVar

from podgpu.agent.node_document import from_snapshot, without_figures
from podgpu.agent.process_metrics import process_families
from podgpu.metrics.body import NO_METRICS, Body, Exposition
from podgpu.metrics.gpu_manager import render_gpu_manager
from podgpu.metrics.render import Policy, render_dcgm, render_podgpu, render_self
from podgpu.metrics.text import encode
from podgpu.model import Snapshot
from podgpu.node_state import NodeState, encode_node
from podgpu.series import Family

K = TypeVar("K")
T = TypeVar("T")
ExpositionName = Literal["fresh", "stale", "gpu_manager"]
_LARGE = 2_000
"""Series. So many take a few milliseconds to render: more are not for the thread in which everybody is answered."""


class Published:
    """All that a request handler, or any other way out, needs. It never changes; it is replaced as a whole.

    Most snapshots nobody asks for, so nothing is rendered before somebody does. Who asks while it is being made waits
    for that one.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        policy: Policy,
        read_at: float,
        exporter_id: str = "",
        interval: float | None = None,
    ) -> None:
        self.snapshot = snapshot
        self._exporter_id = exporter_id
        self._interval = interval
        self._documents: dict[str, NodeState] = {}
        self._bodies: dict[bool, Body] = {}
        self.read_at = read_at
        """Monotonic time of the last telemetry turn."""
        self._policy = policy
        self._making = threading.RLock()
        self._expositions: dict[ExpositionName, Exposition] = {}

    # -- the node's document ---------------------------------------------------------------------------------------

    @property
    def state(self) -> NodeState:
        """The document of this node, built on the first request."""
        return self._once(self._documents, "fresh", self._build_state)

    def _build_state(self) -> NodeState:
        return from_snapshot(self.snapshot, self._policy.hostname, self._exporter_id, self._interval)

    def node_json(self, fresh: bool) -> Body:
        """Answer of `/api/v1/node`. Figures that are not fresh are left out."""
        return self._once(
            self._bodies, fresh, lambda: Body.of(encode_node(self.state if fresh else without_figures(self.state)))
        )

    # -- metrics text ------------------------------------------------------------------------------------------------

    @property
    def fresh(self) -> Exposition:
        return self._exposition(
            "fresh",
            lambda: (
                *render_dcgm(self.state, self._policy),
                *render_podgpu(self.state, self._policy),
                *self._self_families(),
                *self._gpu_manager_families(),
            ),
        )

    @property
    def stale(self) -> Exposition:
        """Served when the figures are too old: metrics about the exporter only."""
        return self._exposition("stale", self._self_families)

    @property
    def gpu_manager(self) -> Exposition:
        """gpu-manager's families only."""
        return self._exposition("gpu_manager", self._gpu_manager_families) if self._policy.gpu_manager else NO_METRICS

    def _self_families(self) -> list[Family]:
        proc = self._policy.process_metrics
        return [*render_self(self.state), *(process_families(proc) if proc else ())]

    def _gpu_manager_families(self) -> list[Family]:
        return render_gpu_manager(self.state, self._policy) if self._policy.gpu_manager else []

    def exposition_if_made(self, name: ExpositionName) -> Exposition | None:
        return self._expositions.get(name)

    @property
    def is_large(self) -> bool:
        """As far as can be told before it is rendered."""
        virtual = len(self.snapshot.assignments) if self._policy.virtual_gpus else 0
        fields = len(self._policy.counters) * (len(self.snapshot.readings) + virtual)
        return fields + len(self.snapshot.assignments) + 9 * len(self.snapshot.usage.containers) > _LARGE

    def _exposition(self, name: ExpositionName, families: Callable[[], Iterable[Family]]) -> Exposition:
        return self._once(self._expositions, name, lambda: Exposition.of(encode(families())))

    def _once(self, made: dict[K, T], name: K, make: Callable[[], T]) -> T:
        found = made.get(name)
        if found is None:
            with self._making:
                found = made.get(name)
                if found is None:
                    found = made[name] = make()
        return found
