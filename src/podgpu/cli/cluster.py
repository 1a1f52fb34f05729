"""`podgpu cluster`: reads every node and serves one page, metrics and JSON for all of them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import click
from click.core import ParameterSource

from podgpu.cli.exporter_options import EXPORTER_ACCESS_OPTIONS, PRICES_HELP, pick_options
from podgpu.cli.options import ACCESS, COMMON, COMPATIBILITY, KUBERNETES, USAGE, Option, make_command
from podgpu.cli.process import configure_logging
from podgpu.cluster.collect import Collector
from podgpu.cluster.discover import ApiOwners, KubernetesTargets, ServiceSelector
from podgpu.cluster.loop import Cluster, MakeCollector
from podgpu.cluster.prices import read_prices
from podgpu.cluster.prometheus import PrometheusCollector
from podgpu.cluster.prometheus_history import PrometheusHistory
from podgpu.cluster.promql import PrometheusServer
from podgpu.cluster.record import cluster_recorder, cluster_waste
from podgpu.cluster.scrape import FixedTargets, ScrapeCollector, Targets
from podgpu.cluster.settings import ViewSettings, check_settings
from podgpu.errors import UsageError
from podgpu.history.answers import HistorySource
from podgpu.http_client import Access
from podgpu.kube.config import require_config
from podgpu.web.app import PROBE_OPTION, Several, load_protection, run
from podgpu.web.cluster_app import cluster_listeners
from podgpu.web.sockets import Address, parse_address

_log = logging.getLogger("podgpu")
_SYNC_SECONDS = 10.0

_INTERVALS_FRESH = 3
_DROP_AFTER = 300.0
_SCRAPE_TIMEOUT = 5.0
_BACKENDS = ("prometheus", "scrape", "discover_kubernetes")


def _option(flag: str, default: str, text: str, kind: str = "text", *, group: str = COMMON, **more: Any) -> Option:
    env = f"PODGPU_CLUSTER_{flag.replace('-', '_').upper()}"
    return Option(flag, env=env, default=default, help=text, kind=kind, group=group, **more)


PROMETHEUS_OPTIONS: tuple[Option, ...] = (
    _option("prometheus", "", "Read from this server, which has Prometheus' HTTP API: HOST:9090 or a URL."),
    _option("match", "", 'Label matchers added to every query, such as cluster="a".', group=ACCESS),
    _option("prometheus-ca-file", "", "CA certificates (PEM) that verify the server.", group=ACCESS, common=False),
    _option(
        "prometheus-insecure-skip-verify",
        "false",
        "Do not verify the server's certificate.",
        "bool",
        group=ACCESS,
        common=False,
    ),
    _option(
        "prometheus-username",
        "",
        "User name for basic authentication; needs --prometheus-password-file.",
        group=ACCESS,
        common=False,
    ),
    _option(
        "prometheus-password-file",
        "",
        "File with the password of --prometheus-username. It is read for every query.",
        group=ACCESS,
        common=False,
    ),
    _option(
        "prometheus-token-file",
        "",
        "File with a bearer token for the server. It is read for every query.",
        group=ACCESS,
        common=False,
    ),
    _option("prometheus-tenant", "", "Tenant, sent as X-Scope-OrgID (Mimir, Cortex).", group=ACCESS, common=False),
)
SCRAPE_OPTIONS: tuple[Option, ...] = (
    _option("scrape", "", "Read from these exporters: HOST:9400,… or URLs."),
    _option(
        "discover-kubernetes",
        "",
        "Read from the endpoints of Services with these labels: [NAMESPACE/]SELECTOR, such as"
        " monitoring/app.kubernetes.io/name=podgpu.",
    ),
    _option("history-dir", "", "Store history in this directory (docs/cluster.md#history).", group=USAGE),
    *EXPORTER_ACCESS_OPTIONS,
)
VIEW_OPTIONS: tuple[Option, ...] = (
    _option("interval", "15s", "Interval between readings of the nodes.", "duration"),
    _option(
        "stale-after",
        "45s",
        "A node is stale if it was not read for this time. Averages do not include stale nodes. Default: 3 intervals.",
        "duration",
    ),
    _option(
        "node-label", "Hostname,hostname,node,instance", "Labels with the node's name; the first one present is used."
    ),
    _option(
        "used-field",
        "DCGM_FI_DEV_MEM_COPY_UTIL",
        "DCGM field from which the utilisation of used GPUs is computed.",
        group=USAGE,
    ),
    _option("window", "5m", "Window of the rolling average of the utilisation of used GPUs.", "duration", group=USAGE),
    _option(
        "idle-after",
        "30m",
        "An allocated GPU that is idle for longer than this is reported as wasteful.",
        "duration",
        group=USAGE,
    ),
    _option("prices", "", PRICES_HELP, group=USAGE),
    _option(
        "owners",
        "auto",
        "Source of pod owners if kube_pod_owner is missing: the API server, or none. auto: the API server if allowed.",
        "choice:auto|api|none",
        group=KUBERNETES,
    ),
    _option(
        "legacy-map-metrics", "false", "Also export POD_GPU_MAP_INFO_<n>.", "bool", group=COMPATIBILITY, common=False
    ),
)
_LIFECYCLE_HELP = "Accept POST /-/forget from this machine (docs/security.md)."
CLUSTER_OPTIONS: tuple[Option, ...] = (
    _option("address", ":9401", "Address to listen on: :PORT, HOST:PORT or [IPV6]:PORT.", short="a"),
    *PROMETHEUS_OPTIONS,
    *SCRAPE_OPTIONS,
    *VIEW_OPTIONS,
    *pick_options(
        ("kubeconfig", "web-config-file", "probe-address", "web-enable-lifecycle", "debug", "log-format"),
        {"web-enable-lifecycle": {"help": _LIFECYCLE_HELP}},
    ),
)


@make_command(
    "cluster",
    CLUSTER_OPTIONS,
    ("podgpu cluster --scrape gpu-1:9400,gpu-2:9400", "read two nodes; open http://localhost:9401/"),
    (
        "podgpu cluster --discover-kubernetes monitoring/app.kubernetes.io/name=podgpu",
        "read all nodes that run an exporter, found by its Service",
    ),
    ("podgpu cluster --prometheus prometheus:9090 --prices prices.yaml", "read from Prometheus, with prices"),
)
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Show all nodes on one page: which pod is on which GPU, what is idle or broken, and what it costs.

    Give exactly one of --prometheus, --scrape and --discover-kubernetes.
    """
    configure_logging(options["log_format"], options["debug"])
    address = parse_address(options["address"])
    probe_address = parse_address(options["probe_address"], PROBE_OPTION) if options["probe_address"] else None
    settings = _settings(ctx, options)
    check_backend(ctx, options)
    _run(options, settings, address, probe_address)


def _settings(ctx: click.Context, options: dict[str, Any]) -> ViewSettings:
    stale_after, drop_after = choose_ages(ctx, options)
    return check_settings(
        ViewSettings(
            interval=options["interval"],
            stale_after=stale_after,
            drop_after=drop_after,
            used_field=options["used_field"],
            window=options["window"],
            idle_after=options["idle_after"],
            legacy_map_metrics=options["legacy_map_metrics"],
        )
    )


def choose_ages(ctx: click.Context, options: dict[str, Any]) -> tuple[float, float]:
    """Returns the ages in seconds after which a node is stale, and after which it is removed."""
    is_set = ctx.get_parameter_source("stale_after") is not ParameterSource.DEFAULT
    stale_after = options["stale_after"] if is_set else _INTERVALS_FRESH * options["interval"]
    return stale_after, max(_DROP_AFTER, 2 * stale_after)


def check_backend(
    ctx: click.Context,
    options: dict[str, Any],
    only_with: tuple[Sequence[Option], Sequence[Option]] = (PROMETHEUS_OPTIONS, SCRAPE_OPTIONS),
) -> None:
    """Checks that exactly one backend is chosen. Raises UsageError.

    `only_with` are the options that apply only to Prometheus, and those that apply only to scraping.
    """
    chosen = [name for name in _BACKENDS if options[name]]
    if len(chosen) != 1:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in chosen)
        problem = f"{flags} cannot be combined" if chosen else f"podgpu {ctx.command.name} needs a source"
        raise UsageError(
            f"{problem}: give exactly one of --prometheus HOST:9090, --scrape HOST:9400,… and "
            "--discover-kubernetes SELECTOR"
        )
    if chosen == ["prometheus"]:
        _reject_options(ctx, only_with[1], "--scrape or --discover-kubernetes")
    else:
        _reject_options(ctx, only_with[0], "--prometheus")


def _reject_options(ctx: click.Context, others: Sequence[Option], backend: str) -> None:
    """Rejects flags that apply only to another backend.

    Environment variables are ignored, because they may be meant for another command.
    """
    for option in others:
        if ctx.get_parameter_source(option.parameter) is ParameterSource.COMMANDLINE:
            raise UsageError(f"--{option.flag} is used only with {backend}")


def _run(
    options: Mapping[str, Any],
    settings: ViewSettings,
    address: Address,
    probe_address: Address | None,
) -> None:
    """Runs until SIGINT or SIGTERM. Raises UsageError and StartError."""
    with ExitStack() as stack:
        make_collector = choose_collector(options, settings, stack)
        cluster = Cluster(make_collector, settings, read_prices(options["prices"]))
        recorder = cluster_recorder(cluster, options["history_dir"], with_figures=not options["prometheus"])
        history: HistorySource = _prometheus_history(options) if options["prometheus"] else recorder
        protection = load_protection(options["web_config_file"])
        lifecycle = options["web_enable_lifecycle"]
        waste = cluster_waste(cluster, recorder)
        listeners = cluster_listeners(cluster, address, probe_address, protection, history, waste, lifecycle)
        run(Several([cluster, recorder]), listeners, lambda bound: _announce(bound[0]))


def _announce(bound: Address) -> None:
    _log.info("listening on %s/metrics; the page is at %s/", bound.url, bound.url)


def choose_collector(options: Mapping[str, Any], settings: ViewSettings, stack: ExitStack) -> MakeCollector:
    """Raises UsageError."""
    make = _prometheus_collector if options["prometheus"] else _scrape_collector
    return make(options, settings, stack)


def _prometheus_collector(options: Mapping[str, Any], settings: ViewSettings, stack: ExitStack) -> MakeCollector:
    server = _prometheus_server(options)
    owners = _owners(options, stack)

    def make() -> Collector:
        find_owners = owners.of if owners else None
        return PrometheusCollector(server, settings, keep_fields=settings.keep_fields, find_owners=find_owners)

    with _naming_option("--prometheus"):
        make()  # raises errors in the options at start
    return make


def _prometheus_history(options: Mapping[str, Any]) -> HistorySource:
    with _naming_option("--prometheus"):
        return PrometheusHistory(_prometheus_server(options))


def _prometheus_server(options: Mapping[str, Any]) -> PrometheusServer:
    tenant = options["prometheus_tenant"]
    headers = {"X-Scope-OrgID": tenant} if tenant else {}
    return PrometheusServer(
        url=options["prometheus"],
        access=Access.from_options(options, "prometheus", "Prometheus", **headers),
        match=options["match"].strip(),
        node_labels=_names(options["node_label"]),
    )


def _scrape_collector(options: Mapping[str, Any], settings: ViewSettings, stack: ExitStack) -> MakeCollector:
    access = Access.from_options(options, "exporter", "the exporter")
    node_labels = _names(options["node_label"])
    targets, wait = _targets(options, access, stack)
    owners = _owners(options, stack)
    notes = (
        owners.notes if owners and options["owners"] == "api" else tuple
    )  # with auto, missing owners are not reported

    def make() -> Collector:
        """Runs in the thread of the rounds, so that probes are answered while it waits for the API server."""
        wait()
        return ScrapeCollector(
            targets,
            access,
            timeout=min(_SCRAPE_TIMEOUT, settings.interval),
            keep_fields=settings.keep_fields,
            node_labels=node_labels,
            drop_after=settings.drop_after,
            owners=owners.all if owners else dict,
            notes=notes,
        )

    return make


def _targets(options: Mapping[str, Any], access: Access, stack: ExitStack) -> tuple[Targets, Callable[[], None]]:
    """Returns the targets, and a function that waits until they are discovered."""
    if options["scrape"]:
        with _naming_option("--scrape"):
            return FixedTargets(options["scrape"].split(","), access), lambda: None
    selector = ServiceSelector.parse(options["discover_kubernetes"])
    https = bool(options["exporter_ca_file"] or options["exporter_insecure_skip_verify"])
    targets = KubernetesTargets(require_config(options["kubeconfig"]), selector, https=https)
    stack.callback(targets.close)

    def wait() -> None:
        if not targets.wait_synced(_SYNC_SECONDS):
            _log.warning("%s", "; ".join(targets.notes()))

    return targets, wait


def _owners(options: Mapping[str, Any], stack: ExitStack) -> ApiOwners | None:
    """With auto, ~/.kube/config is not used, because it may belong to another cluster."""
    uses_api = options["discover_kubernetes"] or options["kubeconfig"] or "KUBERNETES_SERVICE_HOST" in os.environ
    if options["owners"] == "none" or (options["owners"] == "auto" and not uses_api):
        return None
    owners = ApiOwners(require_config(options["kubeconfig"]))
    stack.callback(owners.close)
    return owners


@contextmanager
def _naming_option(option: str) -> Iterator[None]:
    """Adds the option to a UsageError whose message does not begin with an option."""
    try:
        yield
    except UsageError as e:
        raise UsageError(str(e) if str(e).startswith("--") else f"{option} {e}") from e


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise UsageError("--node-label is empty: give at least one label, for example Hostname,hostname,node,instance")
    return names
