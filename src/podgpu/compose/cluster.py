"""This module assembles `podgpu cluster` as the options say: whom it asks, a Prometheus server or the exporters
themselves, where the past comes from, and what is served."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from podgpu.cluster.loop import Cluster
from podgpu.cluster.publish import Publisher
from podgpu.cluster.reading import Backend, MakeBackend
from podgpu.cluster.settings import ViewSettings
from podgpu.compose.process import look_past_what_stays
from podgpu.compose.servers import access_by
from podgpu.configuration.price_file import read_prices
from podgpu.errors import SourceError, UsageError
from podgpu.web.app import Served, Several, protected_by, run
from podgpu.web.sockets import Address

if TYPE_CHECKING:
    from podgpu.cluster.prom.backend import PrometheusPlace
    from podgpu.cluster.scraping.backend import Targets
    from podgpu.cluster.scraping.discover import ApiOwners
    from podgpu.compose.agent import Naming
    from podgpu.history.asking import History
    from podgpu.http_client import Access
    from podgpu.kube.config import ApiConfig

_log = logging.getLogger("podgpu")
_SYNC_SECONDS = 10.0
_MOST_AT_A_TIME = 1000


def run_cluster(
    options: Mapping[str, Any], settings: ViewSettings, address: Address, probe_address: Address | None, naming: Naming
) -> None:
    """Until SIGINT or SIGTERM. Raises UsageError and StartError."""
    # Here, as `podgpu autoscale`, which shares what is below, has no page.
    from podgpu.web.cluster_app import cluster_listeners

    with ExitStack() as at_the_end:
        make_backend = chosen_backend(options, settings, at_the_end)
        publisher = Publisher(settings, read_prices(options["prices"]))
        with naming("history_dir"):
            cluster, beside, history = _with_history(options, make_backend, publisher)
        protection = at_the_end.enter_context(protected_by(options["web_config_file"]))
        lifecycle = options["web_enable_lifecycle"]
        listeners = cluster_listeners(cluster, address, probe_address, protection, history, lifecycle)
        look_past_what_stays()
        run(Several([cluster, *beside]), listeners, lambda bound: _announce(bound[0]))


def _announce(bound: Address) -> None:
    _log.info("listening on %s/metrics, the page is on %s/", bound.url, bound.url)


def _with_history(
    options: Mapping[str, Any], make_backend: MakeBackend, publisher: Publisher
) -> tuple[Cluster, list[Served], History]:
    """Prometheus has the past already; the exporters have to be watched for it."""
    if options["prometheus"]:
        return Cluster(make_backend, publisher), [], prometheus_history(options)
    from podgpu.compose.histories import cluster_with_keeper, history_of

    cluster, keeper = cluster_with_keeper(make_backend, publisher, directory=options["history_dir"])
    return cluster, [keeper], history_of(keeper)


# Whom to ask


def chosen_backend(options: Mapping[str, Any], settings: ViewSettings, at_the_end: ExitStack) -> MakeBackend:
    """Raises UsageError."""
    make = prometheus_backend if options["prometheus"] else scrape_backend
    return make(options, settings, at_the_end)


def prometheus_backend(options: Mapping[str, Any], settings: ViewSettings, at_the_end: ExitStack) -> MakeBackend:
    """Raises UsageError."""
    from podgpu.cluster.prom.backend import PrometheusBackend

    place = _prometheus_place(options)
    owners = _owners(options, at_the_end)

    def make() -> Backend:
        return PrometheusBackend(place, settings, owners.of if owners else None)

    with _naming("--prometheus"):
        make()  # whatever is wrong with the options is said at once
    return make


def prometheus_history(options: Mapping[str, Any]) -> History:
    """Whoever has the present from the server has the past from there, too. Raises UsageError."""
    from podgpu.cluster.prom.history import PrometheusHistory

    with _naming("--prometheus"):
        return PrometheusHistory(_prometheus_place(options))


def _prometheus_place(options: Mapping[str, Any]) -> PrometheusPlace:
    from podgpu.cluster.prom.backend import PrometheusPlace

    tenant = options["prometheus_tenant"]
    return PrometheusPlace(
        url=options["prometheus"],
        access=access_by(options, "prometheus", "Prometheus", {"X-Scope-OrgID": tenant} if tenant else {}),
        match=options["match"],
        node_labels=_names(options["node_label"]),
        timeout=options["prometheus_timeout"],
    )


def scrape_backend(options: Mapping[str, Any], settings: ViewSettings, at_the_end: ExitStack) -> MakeBackend:
    """Raises UsageError."""
    from podgpu.cluster.scraping.backend import ScrapeBackend, ScrapeSettings

    access = access_by(options, "exporter", "the exporter")
    scraping = ScrapeSettings(
        deadline=options["scrape_timeout"],
        concurrency=_concurrency(options["scrape_concurrency"]),
        used_field=settings.used_field,
        fields_beside=settings.fields_beside,
        node_labels=_names(options["node_label"]),
        keep_gone=settings.drop_after,
    )
    targets, wait = _targets(options, access, at_the_end)
    owners = _owners(options, at_the_end)
    notes = owners.notes if owners and options["owners"] == "api" else tuple  # auto does without and says nothing

    def make() -> Backend:
        """In the rounds' own thread: probes are answered while the API server is waited for."""
        wait()
        return ScrapeBackend(targets, access, scraping, owners=owners.all if owners else None, notes=notes)

    return make


def _targets(options: Mapping[str, Any], access: Access, at_the_end: ExitStack) -> tuple[Targets, Callable[[], None]]:
    """And what to do before they are first asked for."""
    if options["scrape"]:
        from podgpu.cluster.scraping.backend import FixedTargets

        with _naming("--scrape"):
            return FixedTargets(options["scrape"].split(","), access), lambda: None
    from podgpu.cluster.scraping.discover import KubernetesTargets, Selection, check_port

    selection, port = Selection.parse(options["discover_kubernetes"]), check_port(options["discover_port"])
    https = bool(options["exporter_ca_file"] or options["exporter_insecure_skip_verify"])
    targets = KubernetesTargets(api_config(options["kubeconfig"]), selection, port, https=https)
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
    from podgpu.cluster.scraping.discover import ApiOwners

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


def _concurrency(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text) <= _MOST_AT_A_TIME):
        raise UsageError(f"--scrape-concurrency {text!r}: write a number from 1 to {_MOST_AT_A_TIME}")
    return int(text)
