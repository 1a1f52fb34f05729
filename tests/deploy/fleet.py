"""Simulated GPU nodes with podgpu, a real Prometheus with the shipped rules, and a real
Alertmanager.

The tests of alerts, dashboards and autoscaling use `fleet_in`. Durations in the rules are shortened
by `hasten`; the nodes run in real time.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import yaml

from podgpu.labs.simulate.simulated_node import Tenant, create_host_files, place_loads, pods
from podgpu.metrics.counters import parse_counters, shipped_counters
from podgpu.metrics.fields import HOST_LABELS, THROTTLE_REASONS, NameSet, fields
from podgpu.metrics.labels import Policy
from podgpu.node.agent.agent import Agent, Settings
from podgpu.node.gpu.nvml.nvml_telemetry import NvmlTelemetry
from podgpu.node.gpu.nvml.switch_splitter import SwitchLogFactory
from podgpu.node.holders.identity import IdentityReader
from podgpu.node.holders.kubelet import KubeletAllocation
from podgpu.node.holders.reader import HolderSources
from podgpu.node.usage.containers import ContainerFinder
from podgpu.web.app import Address
from tests.deploy.relabelings import scrape_job
from tests.fleet.real_servers import alertmanager, expositions_at, needs, prometheus
from tests.nodes.clock import PATIENCE, wait_until
from tests.simulated import FaultyNvml
from tests.simulated_kubelet import FaultyKubelet
from tests.web.server import running

ROOT = Path(__file__).parents[2]
RULES = sorted((ROOT / "deploy" / "helm" / "podgpu" / "files" / "rules").glob("*.yaml"))
SCRAPE_EVERY = "250ms"
FASTER = 300
"""Factor by which durations of the rules are shortened. Five minutes become one second, an hour
twelve.
"""
_GIB = 1024**3

needs_servers = needs("prometheus", "prometheus-alertmanager")


def hasten(rules: str, factor: int = FASTER) -> str:
    """Divides all durations in a rule file by the factor.

    These are `for`, `interval`, ranges in square brackets, offsets, and numbers that an age
    (`time() - …`) is compared with, in expressions and in the queries of annotations.
    """

    def shorter(seconds: float) -> str:
        return f"{max(1, round(1000 * seconds / factor))}ms"

    def in_query(text: str) -> str:
        text = re.sub(
            r"\[(\d+)([smhd])\]", lambda m: f"[{shorter(int(m[1]) * _UNITS[m[2]])}]", text
        )
        text = re.sub(
            r"offset (\d+)([smhd])", lambda m: f"offset {shorter(int(m[1]) * _UNITS[m[2]])}", text
        )
        return re.sub(
            r"(time\(\) - [^<>]+[<>] )(\d+)", lambda m: f"{m[1]}{int(m[2]) / factor}", text
        )

    loaded = yaml.safe_load(rules)
    for group in loaded["groups"]:
        if "interval" in group:
            group["interval"] = shorter(_seconds(group["interval"]))
        for rule in group["rules"]:
            rule["expr"] = in_query(rule["expr"])
            rule["annotations"] = {
                name: in_query(text) for name, text in rule.get("annotations", {}).items()
            }
            if "for" in rule:
                rule["for"] = shorter(_seconds(rule["for"]))
    return yaml.safe_dump(loaded, sort_keys=False)


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _seconds(duration: str) -> int:
    return int(duration[:-1]) * _UNITS[duration[-1]]


class Node:
    """One GPU node: driver, kubelet, /proc, log directories, and the exporter that reads them."""

    def __init__(
        self,
        name: str,
        gpus: str,
        root: Path,
        tenants: Callable[[FaultyNvml], list[Tenant]],
        names: NameSet = "4.8",
    ) -> None:
        """`names`: value of --dcgm-names."""
        self.name = name
        self._names = names
        self.driver = FaultyNvml(gpus, node=name)
        self.tenants = tenants(self.driver)
        place_loads(self.driver, self.tenants)
        root.mkdir()
        self.proc = create_host_files(root, self.tenants)
        self.kubelet = FaultyKubelet(str(root / "kubelet.sock"), pods(self.tenants))
        self.agent = self._agent(root)
        self._served = ExitStack()
        self.address = Address("127.0.0.1", 0)

    def _agent(self, root: Path) -> Agent:
        names = IdentityReader(str(root / "pods"), str(root / "containers"))
        count = len(self.driver.gpus)
        # Throttling counters are in the counter file, so that they are read as often as the other
        # fields.
        throttling = "".join(
            f"{fields()[number].name}, counter, Throttling.\n" for number in THROTTLE_REASONS
        )
        counters = (
            *(shipped_counters("default", self._names) or ()),
            *parse_counters(throttling, "throttling"),
        )
        switch_logs = SwitchLogFactory(
            "switches",
            lambda device, _: self.driver.switch_log(device.uuid),
            privileged=lambda: True,
        )
        return Agent(
            NvmlTelemetry(
                self.driver, "nvml", count_expected=lambda: count, switch_logs=switch_logs
            ),
            HolderSources([KubeletAllocation(self.kubelet.socket)], names.read),
            Settings(
                interval=0.3,
                allocation_interval=0.3,
                usage_interval=0.3,
                policy=Policy(
                    counters=counters, hostname=self.name, hostname_labels=HOST_LABELS[self._names]
                ),
            ),
            containers=ContainerFinder(str(root / "proc")),
        )

    @property
    def instance(self) -> str:
        return f"{self.address.host}:{self.address.port}"

    def uuid(self, gpu: int) -> str:
        return self.driver.gpus[gpu].uuid

    def up(self) -> None:
        """Starts the server at the same address as before."""
        self.address = self._served.enter_context(running(self.agent, self.address)).address

    def down(self) -> None:
        self._served.close()

    @contextmanager
    def living(self) -> Iterator[None]:
        with self.kubelet:
            self.agent.warm_up()
            self.agent.start(lambda: None)
            self.up()
            try:
                yield
            finally:
                self.down()
                self.driver.faults.release_all()
                self.driver.faults.unload_driver()  # otherwise `stop` waits for the XID watch
                self.agent.stop()


def _first_tenants(driver: FaultyNvml) -> list[Tenant]:
    """GPUs 0 and 1 have one pod each, GPU 2 is shared by two pods, and GPU 3 is free."""
    whole, shared = "nvidia.com/gpu", "nvidia.com/gpu.shared"
    uuids = [gpu.uuid for gpu in driver.gpus]
    return [
        Tenant("research", "train-0", "trainer", whole, uuids[0], 0, duty=0.9, memory=38 * _GIB),
        Tenant("serving", "chat-0", "engine", whole, uuids[1], 1, duty=0.5, memory=20 * _GIB),
        Tenant(
            "batch", "embed-0", "worker", shared, f"{uuids[2]}::0", 2, duty=0.35, memory=9 * _GIB
        ),
        Tenant("batch", "ocr-0", "worker", shared, f"{uuids[2]}::1", 2, duty=0.15, memory=5 * _GIB),
    ]


def _second_tenants(driver: FaultyNvml) -> list[Tenant]:
    """GPU 0 is an older model without profiling metrics. GPU 1 is in MIG mode, with one instance
    held and one free.
    """
    older, cut = driver.gpus
    first = cut.instances[0]
    return [
        Tenant(
            "research",
            "eval-0",
            "runner",
            "nvidia.com/gpu",
            older.uuid,
            0,
            duty=0.4,
            memory=8 * _GIB,
        ),
        Tenant(
            "notebooks",
            "ada-0",
            "lab",
            "nvidia.com/mig-1g.10gb",
            first.uuid,
            1,
            first.gi_id,
            0.3,
            2 * _GIB,
        ),
    ]


class Server:
    """A server with a JSON API over HTTP."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **query: str) -> Any:
        with urllib.request.urlopen(
            f"{self.url}{path}?{urlencode(query)}", timeout=PATIENCE
        ) as answer:
            body = answer.read()
        return json.loads(body) if body.startswith((b"{", b"[")) else body


@dataclass(frozen=True)
class Series:
    labels: Mapping[str, str]
    value: float


class PrometheusServer(Server):
    def ask(self, query: str) -> list[Series]:
        """Runs an instant query at the current time."""
        data = self.get("/api/v1/query", query=query)["data"]
        if data["resultType"] == "scalar":
            return [Series({}, float(data["result"][1]))]
        return [Series(one["metric"], float(one["value"][1])) for one in data["result"]]

    def series(self, matching: str) -> list[dict[str, str]]:
        found: list[dict[str, str]] = self.get("/api/v1/series", **{"match[]": matching})["data"]
        return found


class AlertmanagerServer(Server):
    def firing(self) -> list[dict[str, Any]]:
        """Returns Alertmanager's active alerts, each with `labels` and `annotations`."""
        found: list[dict[str, Any]] = self.get("/api/v2/alerts", active="true")
        return found


@dataclass
class ThirdNode:
    """A node without an exporter that kube-state-metrics reports. It has no GPUs at first."""

    gpus: int = 0

    def metrics(self, _path: str) -> str:
        return f'kube_node_status_allocatable{{node="node-3",resource="nvidia_com_gpu",unit="integer"}} {self.gpus}\n'


@dataclass
class Fleet:
    nodes: Sequence[Node]
    prometheus: PrometheusServer
    alertmanager: AlertmanagerServer
    folder: Path = field(default_factory=Path)
    third_node: ThirdNode = field(default_factory=ThirdNode)

    def firing(self) -> set[tuple[str, ...]]:
        return self.short(self.alertmanager.firing())

    def short(self, alerts: Sequence[Mapping[str, Any]]) -> set[tuple[str, ...]]:
        """Returns name, node, GPU and pod of each alert. Missing values are empty."""
        instances = {node.instance: node.name for node in self.nodes}
        return {
            (
                labels["alertname"],
                labels.get("Hostname")
                or labels.get("hostname")
                or instances.get(labels.get("instance", ""), labels.get("node", "")),
                labels.get("gpu", ""),
                labels.get("pod", ""),
            )
            for labels in (alert["labels"] for alert in alerts)
        }

    def scrape_carelessly(self, do: bool) -> None:
        """Adds or removes a second scrape job for the first node, without the relabelings."""
        targets = (
            [{"targets": [self.nodes[0].instance], "labels": {"pod": "podgpu-node-1"}}]
            if do
            else []
        )
        write_whole(self.folder / "careless.json", json.dumps(targets))


def write_whole(file: Path, text: str) -> None:
    """Replaces the file atomically, because Prometheus may read it at any time."""
    new = file.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.replace(file)


@contextmanager
def fleet_in(
    folder: Path,
    more_jobs: Sequence[Mapping[str, Any]] = (),
    names: tuple[NameSet, NameSet] = ("4.8", "4.8"),
) -> Iterator[Fleet]:
    """Starts everything and waits until every node is scraped. `names` has the --dcgm-names of each
    node.
    """
    nodes = [
        Node("node-1", "4xH100", folder / "node-1", _first_tenants, names[0]),
        Node("node-2", "1xA100,1xH100/2x1g.10gb", folder / "node-2", _second_tenants, names[1]),
    ]
    third = ThirdNode()
    with ExitStack() as stack:
        for node in nodes:
            stack.enter_context(node.living())
        alerts = AlertmanagerServer(stack.enter_context(alertmanager(folder / "alertmanager")))
        write_whole(folder / "careless.json", "[]")
        careless: dict[str, Any] = {"job_name": "careless", "honor_labels": True}
        careless["file_sd_configs"] = [{"files": [str(folder / "careless.json")]}]
        state_metrics: dict[str, Any] = {"job_name": "kube-state-metrics", "honor_labels": True}
        state_metrics["static_configs"] = [
            {"targets": [stack.enter_context(expositions_at(third.metrics))]}
        ]
        jobs = [
            scrape_job({node.name: node.instance for node in nodes}),
            careless,
            state_metrics,
            *more_jobs,
        ]
        configuration = _configure_prometheus(alerts.url.removeprefix("http://"), jobs, folder)
        options = ["--rules.alert.resend-delay=1s"]
        server = PrometheusServer(
            stack.enter_context(prometheus(folder, (), configuration, options))
        )
        wait_until(
            lambda: len(server.ask("podgpu_exporter_build_info")) == len(nodes),
            "every node is scraped",
        )
        yield Fleet(nodes, server, alerts, folder, third)


def _configure_prometheus(
    alertmanager: str, jobs: Sequence[Mapping[str, Any]], folder: Path
) -> str:
    for file in RULES:
        (folder / file.name).write_text(hasten(file.read_text(encoding="utf-8")), encoding="utf-8")
    return json.dumps(
        {
            "global": {
                "scrape_interval": SCRAPE_EVERY,
                "scrape_timeout": SCRAPE_EVERY,
                "evaluation_interval": "250ms",
            },
            "rule_files": [str(folder / file.name) for file in RULES],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]},
            "scrape_configs": jobs,
        }
    )
