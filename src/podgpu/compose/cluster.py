"""This module assembles `podgpu cluster` as the options say: whom it asks, a Prometheus server or the exporters
themselves, where the past comes from, and what is served."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from podgpu.cluster.collect import Collector
from podgpu.cluster.discover import ApiOwners, KubernetesTargets, ServiceSelector
from podgpu.cluster.loop import Cluster, MakeCollector
from podgpu.cluster.prices import read_prices
from podgpu.cluster.prometheus import PrometheusCollector
from podgpu.cluster.prometheus_history import PrometheusHistory
from podgpu.cluster.promql import PrometheusServer
from podgpu.cluster.scrape import FixedTargets, ScrapeCollector, Targets
from podgpu.cluster.settings import ViewSettings
from podgpu.compose.histories import cluster_recorder
from podgpu.compose.servers import access_by
from podgpu.errors import SourceError, UsageError
from podgpu.history.answers import History
from podgpu.http_client import Access
from podgpu.web.app import Service, Several, load_protection, run
from podgpu.web.sockets import Address

if TYPE_CHECKING:
    from podgpu.compose.agent import Naming
    from podgpu.kube.config import ApiConfig

_log = logging.getLogger("podgpu")
_SYNC_SECONDS = 10.0


def run_cluster(
    options: Mapping[str, Any], settings: ViewSettings, address: Address, probe_address: Address | None, naming: Naming
) -> None:
    """Runs until SIGINT or SIGTERM. Raises UsageError and StartError."""
    # podgpu autoscale shares what is below, and has no page.
    from podgpu.web.cluster_app import cluster_listeners

    with ExitStack() as at_the_end:
        make_collector = choose_collector(options, settings, at_the_end)
        cluster = Cluster(make_collector, settings, read_prices(options["prices"]))
        beside: list[Service] = []
        if options["prometheus"]:
            history: History = _prometheus_history(options)
        else:
            with naming("history_dir"):
                recorder = cluster_recorder(cluster, options["history_dir"])
            history, beside = recorder, [recorder]
        protection = load_protection(options["web_config_file"])
        lifecycle = options["web_enable_lifecycle"]
        listeners = cluster_listeners(cluster, address, probe_address, protection, history, lifecycle)
        run(Several([cluster, *beside]), listeners, lambda bound: _announce(bound[0]))


def _announce(bound: Address) -> None:
    _log.info("listening on %s/metrics, the page is on %s/", bound.url, bound.url)


def choose_collector(options: Mapping[str, Any], settings: ViewSettings, at_the_end: ExitStack) -> MakeCollector:
    """Raises UsageError."""
    make = _prometheus_collector if options["prometheus"] else _scrape_collector
    return make(options, settings, at_the_end)


def _prometheus_collector(options: Mapping[str, Any], settings: ViewSettings, at_the_end: ExitStack) -> MakeCollector:
    server = _prometheus_server(options)
    owners = _owners(options, at_the_end)

    def make() -> Collector:
        find_owners = owners.of if owners else None
        return PrometheusCollector(server, settings, keep_fields=settings.keep_fields, find_owners=find_owners)

    with _naming("--prometheus"):
        make()  # reports wrong options at once
    return make


def _prometheus_history(options: Mapping[str, Any]) -> History:
    with _naming("--prometheus"):
        return PrometheusHistory(_prometheus_server(options))


def _prometheus_server(options: Mapping[str, Any]) -> PrometheusServer:
    tenant = options["prometheus_tenant"]
    return PrometheusServer(
        url=options["prometheus"],
        access=access_by(options, "prometheus", "Prometheus", {"X-Scope-OrgID": tenant} if tenant else {}),
        match=options["match"],
        node_labels=_names(options["node_label"]),
        timeout=options["prometheus_timeout"],
    )


def _scrape_collector(options: Mapping[str, Any], settings: ViewSettings, at_the_end: ExitStack) -> MakeCollector:
    access = access_by(options, "exporter", "the exporter")
    node_labels = _names(options["node_label"])
    targets, wait = _targets(options, access, at_the_end)
    owners = _owners(options, at_the_end)
    notes = owners.notes if owners and options["owners"] == "api" else tuple  # auto does without owners silently

    def make() -> Collector:
        """Called in the thread of the rounds: probes are answered while it waits for the API server."""
        wait()
        return ScrapeCollector(
            targets,
            access,
            timeout=options["scrape_timeout"],
            keep_fields=settings.keep_fields,
            node_labels=node_labels,
            drop_after=settings.drop_after,
            owners=owners.all if owners else dict,
            notes=notes,
        )

    return make


def _targets(options: Mapping[str, Any], access: Access, at_the_end: ExitStack) -> tuple[Targets, Callable[[], None]]:
    """And what to do before they are first asked for."""
    if options["scrape"]:
        with _naming("--scrape"):
            return FixedTargets(options["scrape"].split(","), access), lambda: None
    selector = ServiceSelector.parse(options["discover_kubernetes"])
    https = bool(options["exporter_ca_file"] or options["exporter_insecure_skip_verify"])
    targets = KubernetesTargets(api_config(options["kubeconfig"]), selector, https=https)
    at_the_end.callback(targets.close)

    def wait() -> None:
        if not targets.wait_synced(_SYNC_SECONDS):
            _log.warning("%s", "; ".join(targets.notes()))

    return targets, wait


def _owners(options: Mapping[str, Any], at_the_end: ExitStack) -> ApiOwners | None:
    """Whoever has a kubeconfig at home has not asked for that cluster to be watched."""
    asked_anyway = options["discover_kubernetes"] or options["kubeconfig"] or "KUBERNETES_SERVICE_HOST" in os.environ
    if options["owners"] == "none" or (options["owners"] == "auto" and not asked_anyway):
        return None
    owners = ApiOwners(api_config(options["kubeconfig"]))
    at_the_end.callback(owners.close)
    return owners


def api_config(kubeconfig: str) -> ApiConfig:
    from podgpu.kube.config import load_config

    try:
        return load_config(kubeconfig or None)
    except SourceError as error:
        raise UsageError(f"the API server cannot be asked: {error}") from error


@contextmanager
def _naming(option: str) -> Iterator[None]:
    """A usage error raised inside names the option, where it names none itself."""
    try:
        yield
    except UsageError as e:
        raise UsageError(str(e) if str(e).startswith("--") else f"{option} {e}") from e


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise UsageError("--node-label names no label: write Hostname,hostname,node,instance")
    return names
