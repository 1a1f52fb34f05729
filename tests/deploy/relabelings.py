"""Converts the chart's monitors to scrape jobs of a plain Prometheus.

Discovery is simulated: static targets have the `__meta_kubernetes_*` labels that Prometheus would
discover.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from tests.deploy.chart import Object, the

Labels = dict[str, str]
Rule = dict[str, Any]


def chart_monitor(values: Mapping[str, Any] | None = None, component: str = "exporter") -> Object:
    """Returns the monitor of a component in a chart with these values."""
    kind = (values or {}).get("monitor", {}).get("kind", "ServiceMonitor")
    return the("PodMonitor" if component in ("enrich", "hook") else kind, values, component)


def endpoint_of(monitor: Object) -> Object:
    (endpoint,) = monitor["spec"][
        "endpoints" if monitor["kind"] == "ServiceMonitor" else "podMetricsEndpoints"
    ]
    return dict(endpoint)


def operator_relabelings(monitor: Object) -> list[Rule]:
    """Returns the relabelings for target labels that the Prometheus operator adds before the
    monitor's own.
    """
    by_service = monitor["kind"] == "ServiceMonitor"
    job = {"source_labels": ["__meta_kubernetes_service_name"], "target_label": "job"}
    own_job = {
        "target_label": "job",
        "replacement": f"{monitor['metadata']['namespace']}/{monitor['metadata']['name']}",
    }
    return [
        {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
        *(
            [{"source_labels": ["__meta_kubernetes_service_name"], "target_label": "service"}]
            if by_service
            else []
        ),
        {"source_labels": ["__meta_kubernetes_pod_name"], "target_label": "pod"},
        {"source_labels": ["__meta_kubernetes_pod_container_name"], "target_label": "container"},
        job if by_service else own_job,
        {"target_label": "endpoint", "replacement": endpoint_of(monitor)["port"]},
    ]


def as_prometheus_has_them(relabelings: Iterable[Mapping[str, Any]]) -> list[Rule]:
    """Converts the operator's camelCase keys to Prometheus' snake_case."""
    return [
        {re.sub("[A-Z]", lambda c: f"_{c[0].lower()}", key): value for key, value in one.items()}
        for one in relabelings
    ]


def scrape_job(targets: Mapping[str, str], monitor: Object | None = None) -> dict[str, Any]:
    """Returns a scrape job. `targets` maps node names to exporter addresses. The default monitor is
    the chart's.
    """
    monitor = monitor or chart_monitor()
    endpoint = endpoint_of(monitor)
    return {
        "job_name": f"{monitor['kind']}/{monitor['metadata']['namespace']}/{monitor['metadata']['name']}",
        "honor_labels": endpoint["honorLabels"],
        "metrics_path": endpoint["path"],
        "relabel_configs": [
            *operator_relabelings(monitor),
            *as_prometheus_has_them(endpoint["relabelings"]),
        ],
        "metric_relabel_configs": as_prometheus_has_them(endpoint.get("metricRelabelings", ())),
        "static_configs": [
            {"targets": [address], "labels": discovered(node, monitor)}
            for node, address in targets.items()
        ],
    }


def discovered(node: str, monitor: Object) -> Labels:
    """Returns the labels that discovery would find for the exporter's pod."""
    component = monitor["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"]
    return {
        "__meta_kubernetes_namespace": monitor["metadata"]["namespace"],
        "__meta_kubernetes_service_name": f"podgpu-{component}",
        "__meta_kubernetes_pod_name": f"podgpu-{component}-{node}",
        "__meta_kubernetes_pod_container_name": "podgpu",
        "__meta_kubernetes_pod_node_name": node,
    }
