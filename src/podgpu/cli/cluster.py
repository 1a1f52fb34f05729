"""`podgpu cluster`: many nodes on one address: map, used GPUs, idle ones, cost, and a page."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from podgpu.cli.cluster_options import CLUSTER_OPTIONS, PROMETHEUS_OPTIONS, SCRAPE_OPTIONS
from podgpu.cli.logs import configure_logging
from podgpu.cli.memory import look_for_cycles_seldom, share_one_heap, take_turns_often
from podgpu.cli.option_table import Option
from podgpu.cli.pages import access_by
from podgpu.cli.params import naming_variable, with_options
from podgpu.cluster.loop import Cluster
from podgpu.cluster.prices import NO_PRICES, PriceFile, ReadPrices
from podgpu.cluster.publish import Publisher
from podgpu.cluster.reading import Backend, MakeBackend
from podgpu.cluster.settings import ViewSettings, check_settings
from podgpu.errors import SourceError, UsageError
from podgpu.serve.app import PROBE_OPTION, run
from podgpu.serve.cluster_app import cluster_listeners
from podgpu.serve.sockets import Address, parse_address

if TYPE_CHECKING:
    from podgpu.cluster.scraping.backend import Targets
    from podgpu.cluster.scraping.owners_api import ApiOwners
    from podgpu.fetch.access import Credentials
    from podgpu.kube.access import ApiConfig
    from podgpu.serve.protection import Protection

_log = logging.getLogger("podgpu")
_INTERVALS_FRESH = 3
_SYNC_SECONDS = 10.0
_MOST_AT_A_TIME = 1000
_BACKENDS = ("prometheus", "scrape", "discover_kubernetes")


@click.command("cluster", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@with_options(CLUSTER_OPTIONS)
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Look at every node: which pod is on which GPU, how the used ones are doing, what it costs. With a page.

    Asks a Prometheus server, or scrapes the exporters itself: exactly one of --prometheus, --scrape and
    --discover-kubernetes.
    """
    share_one_heap()
    look_for_cycles_seldom()
    take_turns_often()
    configure_logging(options["log_format"], options["debug"])
    with naming_variable(ctx, "address"):
        address = parse_address(options["address"])
    with naming_variable(ctx, "probe_address"):
        probe_address = parse_address(options["probe_address"], PROBE_OPTION) if options["probe_address"] else None
    settings = _settings(ctx, options)
    with ExitStack() as at_the_end:
        make_backend = _backend(ctx, options, settings, at_the_end)
        cluster = Cluster(make_backend, Publisher(settings, _prices(options["prices"])))
        protection = _protection(options["web_config_file"], at_the_end)
        listeners = cluster_listeners(cluster, address, probe_address, protection)
        run(cluster, listeners, lambda bound: _announce(bound[0]))


def _announce(bound: Address) -> None:
    _log.info("listening on %s/metrics, the page is on %s/", bound.url, bound.url)


def _settings(ctx: click.Context, options: dict[str, Any]) -> ViewSettings:
    said = ctx.get_parameter_source("stale_after") is not ParameterSource.DEFAULT
    interval = options["interval"]
    stale_after = options["stale_after"] if said else _INTERVALS_FRESH * interval
    kept = ctx.get_parameter_source("drop_after") is not ParameterSource.DEFAULT
    return check_settings(
        ViewSettings(
            interval=interval,
            stale_after=stale_after,
            drop_after=options["drop_after"] if kept else max(options["drop_after"], 2 * stale_after),
            used_means=options["used_means"],
            used_field=options["used_field"],
            window=options["window"],
            idle_after=options["idle_after"],
            legacy_map_metrics=options["legacy_map_metrics"],
        )
    )


def _prices(path: str) -> ReadPrices:
    return PriceFile(path).read if path else lambda: (NO_PRICES, ())


def _protection(path: str, at_the_end: ExitStack) -> Protection | None:
    if not path:
        return None
    from podgpu.serve.protection import protect

    protection = protect(path)
    at_the_end.callback(protection.close)
    return protection


# Whom to ask


def _backend(ctx: click.Context, options: dict[str, Any], settings: ViewSettings, at_the_end: ExitStack) -> MakeBackend:
    """Raises UsageError for what cannot be meant, before anything is asked."""
    chosen = [name for name in _BACKENDS if options[name]]
    if len(chosen) != 1:
        given = " and ".join(f"--{name.replace('_', '-')}" for name in chosen) or "nobody"
        raise UsageError(
            f"{given} to be asked: give exactly one of --prometheus URL, --scrape URL,… and "
            "--discover-kubernetes SELECTOR"
        )
    if chosen == ["prometheus"]:
        _refuse(ctx, SCRAPE_OPTIONS, "--scrape or --discover-kubernetes")
        return _prometheus(options, settings, at_the_end)
    _refuse(ctx, PROMETHEUS_OPTIONS, "--prometheus")
    return _scrape(options, settings, at_the_end)


def _refuse(ctx: click.Context, others: Sequence[Option], backend: str) -> None:
    """What would be ignored is not taken. Those from variables are left alone: they may be set for somebody else."""
    for option in others:
        if ctx.get_parameter_source(option.parameter) is ParameterSource.COMMANDLINE:
            raise UsageError(f"--{option.flag} goes with {backend}, which is not given")


def _prometheus(options: dict[str, Any], settings: ViewSettings, at_the_end: ExitStack) -> MakeBackend:
    from podgpu.cluster.prom.backend import PrometheusBackend, PrometheusPlace

    tenant = options["prometheus_tenant"]
    place = PrometheusPlace(
        url=options["prometheus"],
        access=access_by(options, "prometheus", "Prometheus", {"X-Scope-OrgID": tenant} if tenant else {}),
        match=options["match"],
        node_labels=_names(options["node_label"]),
        timeout=options["prometheus_timeout"],
    )
    owners = _owners(options, at_the_end)

    def make() -> Backend:
        return PrometheusBackend(place, settings, owners.of if owners else None)

    with _naming("--prometheus"):
        make()  # whatever is wrong with the options is said at once
    return make


def _scrape(options: dict[str, Any], settings: ViewSettings, at_the_end: ExitStack) -> MakeBackend:
    from podgpu.cluster.scraping.backend import ScrapeBackend, ScrapeSettings
    from podgpu.fetch.access import Credentials

    credentials = Credentials(access_by(options, "exporter", "the exporter"))
    scraping = ScrapeSettings(
        deadline=options["scrape_timeout"],
        concurrency=_concurrency(options["scrape_concurrency"]),
        used_field=settings.used_field,
        node_labels=_names(options["node_label"]),
        keep_gone=settings.drop_after,
    )
    targets, wait = _targets(options, credentials, at_the_end)
    owners = _owners(options, at_the_end)
    said = owners.notes if owners and options["owners"] == "api" else tuple  # auto does without and says nothing

    def make() -> Backend:
        """In the rounds' own thread: probes are answered while the API server is waited for."""
        wait()
        return ScrapeBackend(targets, credentials, scraping, owners=owners.all if owners else None, notes=said)

    return make


def _targets(
    options: dict[str, Any], credentials: Credentials, at_the_end: ExitStack
) -> tuple[Targets, Callable[[], None]]:
    """And what to do before they are first asked for."""
    if options["scrape"]:
        from podgpu.cluster.scraping.backend import FixedTargets

        with _naming("--scrape"):
            return FixedTargets(options["scrape"].split(","), credentials), lambda: None
    from podgpu.cluster.scraping.discover import KubernetesTargets, Selection, check_port

    selection, port = Selection.parse(options["discover_kubernetes"]), check_port(options["discover_port"])
    https = bool(options["exporter_ca_file"] or options["exporter_insecure_skip_verify"])
    targets = KubernetesTargets(_api(options["kubeconfig"]), selection, port, https=https)
    at_the_end.callback(targets.close)

    def wait() -> None:
        if not targets.wait_synced(_SYNC_SECONDS):
            _log.warning("%s", "; ".join(targets.notes()))

    return targets, wait


def _owners(options: dict[str, Any], at_the_end: ExitStack) -> ApiOwners | None:
    """Whoever has a kubeconfig at home has not asked for that cluster to be watched."""
    asked_anyway = options["discover_kubernetes"] or options["kubeconfig"] or "KUBERNETES_SERVICE_HOST" in os.environ
    if options["owners"] == "none" or (options["owners"] == "auto" and not asked_anyway):
        return None
    from podgpu.cluster.scraping.owners_api import ApiOwners

    owners = ApiOwners(_api(options["kubeconfig"]))
    at_the_end.callback(owners.close)
    return owners


def _api(kubeconfig: str) -> ApiConfig:
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
