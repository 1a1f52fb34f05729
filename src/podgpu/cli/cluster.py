"""`podgpu cluster`: reads all nodes and serves one page, metrics and JSON for the cluster."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.core import ParameterSource

from podgpu.cli.options import Options, is_set, make_command, naming_option, split_list
from podgpu.cli.otlp import read_push_settings
from podgpu.errors import ReadNotes, UsageError, collect_notes, texts_of
from podgpu.fleet.budgets import ReadBudgetFile, read_budgets
from podgpu.fleet.prices import ReadPrices, no_prices, read_prices
from podgpu.fleet.read.discover import ApiMap, KubernetesTargets, OwnerWatch, ServiceSelector
from podgpu.fleet.read.engine_reader import EngineReader
from podgpu.fleet.read.prometheus import PrometheusCollector, PrometheusServer
from podgpu.fleet.read.scrape import ScrapeCollector, unique_targets
from podgpu.fleet.readings import Collector
from podgpu.fleet.round import Cluster, MakeCollector
from podgpu.fleet.settings import ViewSettings, check_window, full_scale
from podgpu.fleet.setup import OWNERS_HINT, QUEUE_HINT, SetupHint, hint_history
from podgpu.http_client import Access
from podgpu.kube.client import ApiClient
from podgpu.kube.config import NoApi, is_loopback, load_config
from podgpu.kube.objects import (
    NODES_PATH,
    PODS_PATH,
    PodEndpoint,
    parse_endpoint,
    parse_node_labels,
)
from podgpu.model import PodName, WorkloadOwner
from podgpu.past.books.record import MAX_GPUS, cluster_recorder
from podgpu.past.books.recorder import HistoryRecorder
from podgpu.past.budget_watch import BudgetWatch
from podgpu.past.interface import Past
from podgpu.past.prometheus.prometheus_past import PrometheusPast
from podgpu.past.savings_watch import SavingsWatch
from podgpu.past.sqlite.sqlite_past import SqlitePast
from podgpu.pending.queue_watch import QueueWatch
from podgpu.web.access import KubernetesAccess, UserHeaders
from podgpu.web.app import Listener, Service, load_protection, make_listeners, run
from podgpu.web.cluster_app import cluster_application, cluster_probes, cluster_pusher
from podgpu.writers.webhook import MemoryStore, Webhook, WebhookSettings, parse_events
from podgpu.writers.webhook_notices import NoticeEvent

if TYPE_CHECKING:
    from podgpu.web.protection import Protection

_log = logging.getLogger("podgpu")
_SYNC_SECONDS = 10.0
_INTERVALS_FRESH = 3  # a node is stale after so many rounds without a reading
_DROP_AFTER = 300.0  # the shortest time after which a stale node is dropped
_SCRAPE_TIMEOUT = 5.0
_MAX_GPUS = 12_500
"""For more GPUs, --prometheus reads only totals, because queries for each GPU take too long."""
_BACKENDS = ("prometheus", "scrape", "discover_kubernetes")


@make_command(
    "cluster",
    (
        "podgpu cluster --scrape gpu-1:9400,gpu-2:9400",
        "read two nodes; open http://localhost:9401/",
    ),
    (
        "podgpu cluster --discover-kubernetes monitoring/app.kubernetes.io/name=podgpu",
        "read all nodes that run an exporter, found by its Service",
    ),
    (
        "podgpu cluster --prometheus prometheus:9090 --prices prices.yaml",
        "read from Prometheus, with prices",
    ),
)
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Show all nodes on one page: which pod uses which GPU, which GPUs are idle or broken, and the
    cost.

    Give exactly one of --prometheus, --scrape or --discover-kubernetes.
    """
    _check_token_options(options)
    _check_webhook_options(options)
    settings = make_settings(
        ctx,
        options,
        window=options["window"],
        idle_after=options["idle_after"],
        legacy_map_metrics=options["legacy_map_metrics"],
        export_tokens=options["export_tokens"],
        max_gpus=_MAX_GPUS,
        hints=tuple(_list_hints(options)),
        savings_skip_namespaces=frozenset(split_list(options["savings_skip_namespaces"])),
    )

    with ExitStack() as stack:
        protection = load_protection(options["web_config_file"])
        access = _choose_access(options, protection)
        prices = read_prices(options["prices"])
        budgets = None
        if options["budgets"]:
            budgets = read_budgets(options["budgets"])

        cluster = Cluster(choose_collector(options, settings, stack, prices), settings, prices)
        past: Past
        recorder = None
        services: list[Service] = [cluster]
        if options["prometheus"]:
            past = PrometheusPast(_prometheus_server(options), cluster, prices)
        else:
            recorder = _open_recorder(options, cluster)
            past = SqlitePast(recorder, lambda: cluster.published.state)
            services.append(recorder)
        services += _watch_past(cluster, past, budgets)

        push = read_push_settings(ctx, options, os.environ, kubernetes=_uses_api(options))
        if push is not None:
            services.append(cluster_pusher(cluster, push))

        webhook = _make_webhook(options, cluster, recorder)
        if webhook is not None:
            services.append(webhook)

        read_queue = None
        if options["queue"]:
            read_queue = _watch_queue(options, stack, cluster).read
        app = cluster_application(
            cluster, protection, past, options["web_enable_lifecycle"], access, read_queue
        )

        tls = protection.make_tls if protection else None
        text = "listening on %s/metrics; the page is at /"
        main = Listener(app, options["address"], tls=tls, announcement=text)
        run(services, make_listeners(main, cluster_probes(cluster), options["probe_address"]))


def _check_token_options(options: Options) -> None:
    if options["prometheus"] and options["token_metrics"] == "pods":
        raise UsageError(
            "--token-metrics pods cannot be combined with --prometheus: with it, podgpu reads the"
            " token counters that Prometheus has scraped"
        )
    if options["export_tokens"] and options["token_metrics"] != "pods":
        raise UsageError(
            "--export-tokens needs --token-metrics pods: otherwise, podgpu reads no engine, or"
            " reads the counters from Prometheus, which has them already"
        )


def _check_webhook_options(options: Options) -> None:
    events = parse_events(options["webhook_events"])
    is_chosen = bool(options["webhook_token_file"]) or events != frozenset(NoticeEvent)
    if is_chosen and not options["webhook_url_file"]:
        raise UsageError(
            "--webhook-token-file and --webhook-events need --webhook-url-file: without a URL,"
            " nothing is sent"
        )


def _open_recorder(options: Options, cluster: Cluster) -> HistoryRecorder:
    recorder = cluster_recorder(cluster, options["history_dir"])
    # If the directory cannot be used, the recorder has a warning, and this would be wrong.
    if not recorder.warnings():
        where = options["history_dir"] or "memory; --history-dir keeps it through restarts"
        text = "history of up to %d GPUs is stored in %s; for more, use --prometheus"
        _log.info(text, MAX_GPUS, where)
    return recorder


def _watch_past(cluster: Cluster, past: Past, budgets: ReadBudgetFile | None) -> list[Service]:
    """Returns the services that compute savings and budgets, and shows their results."""
    savings = SavingsWatch(past)
    cluster.read_savings = savings.read
    if budgets is None:
        return [savings]

    watch = BudgetWatch(past, budgets)
    cluster.read_budgets = watch.read
    return [watch, savings]


def _make_webhook(
    options: Options, cluster: Cluster, recorder: HistoryRecorder | None
) -> Webhook | None:
    """Returns None if no webhook is set."""
    if not options["webhook_url_file"]:
        return None
    settings = WebhookSettings(
        options["webhook_url_file"],
        options["webhook_token_file"],
        parse_events(options["webhook_events"]),
        options["webhook_idle_after"],
    )

    store = recorder or MemoryStore()
    webhook = Webhook(settings, lambda: cluster.published.state, store)
    cluster.readers.append(lambda _: webhook.reload())
    cluster.warnings.append(webhook.warnings)
    return webhook


def _list_hints(options: Options) -> Iterator[SetupHint]:
    """Yields what the page cannot show with these options."""
    if options["owners"] == "none" and not options["prometheus"]:
        yield OWNERS_HINT
    if not options["queue"]:
        yield QUEUE_HINT
    if not options["prometheus"] and (options["history_note"] or not options["history_dir"]):
        yield hint_history(options["history_note"])


def _choose_access(options: Options, protection: Protection | None) -> KubernetesAccess | None:
    """Returns None if everybody sees everything. Raises UsageError if options contradict."""
    headers = UserHeaders(options["auth_user_header"], options["auth_groups_header"])
    if options["auth"] == "none":
        if any(headers):
            raise UsageError("--auth-user-header and --auth-groups-header need --auth kubernetes")
        return None

    if headers.groups and not headers.user:
        raise UsageError("--auth-groups-header needs --auth-user-header")
    if protection is not None and protection.has_users:
        raise UsageError(
            "--auth kubernetes cannot be combined with basic_auth_users in --web-config-file: "
            "a request has only one Authorization header"
        )
    is_local = is_loopback(options["address"].host)
    is_verified = protection is not None and protection.requires_client_certificate
    if headers.user and not is_local and not is_verified:
        raise UsageError(
            "--auth-user-header: everybody who reaches podgpu could claim to be any user: listen "
            "only for a proxy in the same pod (-a 127.0.0.1:9401), or require the proxy's client "
            "certificate (client_auth_type: RequireAndVerifyClientCert in --web-config-file)"
        )
    with naming_option("--auth kubernetes"):
        return KubernetesAccess(ApiClient(load_config(options["kubeconfig"])), headers)


def make_settings(ctx: click.Context, options: Options, **more: Any) -> ViewSettings:
    """Builds the settings of the cluster view.

    Raises UsageError if options contradict each other.
    """
    _check_backend(ctx, options)
    stale_after = options["stale_after"]
    if not is_set(ctx, "stale_after"):
        stale_after = _INTERVALS_FRESH * options["interval"]
    settings = ViewSettings(
        interval=options["interval"],
        stale_after=stale_after,
        drop_after=max(_DROP_AFTER, 2 * stale_after),
        used_field=options["used_field"],
        **more,
    )

    full_scale(settings.used_field)
    check_window("--window", settings.window, settings.interval)
    return settings


def _check_backend(ctx: click.Context, options: Options) -> None:
    """Raises UsageError if not exactly one backend is chosen, or if a flag belongs to another one.

    Environment variables of other backends are ignored, because they may be meant for another
    command.
    """
    chosen = [name for name in _BACKENDS if options[name]]
    if len(chosen) != 1:
        problem = f"podgpu {ctx.command.name} needs a source"
        if chosen:
            problem = f"{' and '.join(map(_flag_of, chosen))} cannot be combined"
        raise UsageError(
            f"{problem}: give exactly one of --prometheus HOST:9090, --scrape HOST:9400,… or "
            "--discover-kubernetes SELECTOR"
        )

    foreign_prefixes = ("prometheus_", "match")
    needed = "--prometheus"
    if chosen == ["prometheus"]:
        foreign_prefixes = ("exporter_", "history_")
        needed = "--scrape or --discover-kubernetes"
    for name in options:
        is_flag = ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if is_flag and name.startswith(foreign_prefixes):
            raise UsageError(f"{_flag_of(name)} is used only with {needed}")


def _flag_of(parameter: str) -> str:
    return f"--{parameter.replace('_', '-')}"


def choose_collector(
    options: Options,
    settings: ViewSettings,
    stack: ExitStack,
    prices: ReadPrices = no_prices,
) -> MakeCollector:
    """Returns a function that creates the collector of the chosen backend.

    `podgpu autoscale` has no option --owners, --prices or --token-metrics.
    """
    owners = _watch_owners(options, stack)
    pods = _PodReaders()
    if owners is not None:
        pods = _PodReaders(owners.read, owners.read_kept)

    def read_price_labels() -> Sequence[str]:
        """Returns the names of the node labels that the price file, which may change, uses."""
        price_list, _ = prices()
        return price_list.label_names

    if options["prometheus"]:
        make = partial(
            PrometheusCollector,
            _prometheus_server(options),
            settings,
            owners=pods.read_owners,
            kept_pods=pods.read_kept,
            label_names=read_price_labels,
        )
        with naming_option("--prometheus"):
            make()  # checks the options now; the cluster loop creates its own collector later
        return make

    notes: list[ReadNotes] = []
    # With --owners auto, the page does not show that owners cannot be read.
    if owners is not None and options["owners"] == "api":
        notes.append(owners.notes)
    return _choose_scraper(options, settings, stack, pods, read_price_labels, notes)


class _PodReaders(NamedTuple):
    """Return what the API server says of pods. By default nothing."""

    read_owners: Callable[[], Mapping[PodName, WorkloadOwner]] = dict
    read_kept: Callable[[], frozenset[PodName]] = frozenset


def _choose_scraper(
    options: Options,
    settings: ViewSettings,
    stack: ExitStack,
    pods: _PodReaders,
    read_price_labels: Callable[[], Sequence[str]],
    notes: list[ReadNotes],
) -> MakeCollector:
    """Returns a function that creates the collector of --scrape or --discover-kubernetes.

    `notes`: adds what the collector's own watches say.
    """
    labels = _watch_node_labels(options, stack)
    if labels is not None:
        notes.append(labels.notes)

    def read_node_labels() -> Mapping[str, Mapping[str, str]]:
        if labels is None or not read_price_labels():
            return {}
        return labels.read()

    endpoints = _watch_endpoints(options, stack)
    make_engines = None
    if endpoints is not None:
        notes.append(endpoints.notes)
        make_engines = partial(EngineReader, endpoints.read)

    access = Access.from_options(options, "exporter")
    make_scraper = partial(
        ScrapeCollector,
        settings=settings,
        access=access,
        timeout=min(_SCRAPE_TIMEOUT, settings.interval),
        node_labels=_split_node_label(options["node_label"]),
        read_owners=pods.read_owners,
        read_kept_pods=pods.read_kept,
        read_node_labels=read_node_labels,
        read_notes=partial(collect_notes, notes),
        make_engines=make_engines,
    )
    if options["scrape"]:
        with naming_option("--scrape"):
            urls = unique_targets(options["scrape"].split(","), access)
        return partial(make_scraper, lambda: urls)

    targets = _watch_targets(options, stack)
    # Its notes come first, because without targets the page is empty.
    notes.insert(0, targets.notes)

    def discover_and_make() -> Collector:
        """Waits for the API server.

        Called in the thread of the cluster loop, so that probes are answered meanwhile.
        """
        if not targets.wait_synced(_SYNC_SECONDS):
            _log.warning("%s", "; ".join(texts_of(targets.notes())))
        return make_scraper(targets.urls)

    return discover_and_make


def _watch_owners(options: Options, stack: ExitStack) -> OwnerWatch | None:
    wanted = options.get("owners", "none")
    if wanted == "none" or (wanted == "auto" and not _uses_api(options)):
        return None
    config = load_config(options["kubeconfig"])
    return stack.enter_context(closing(OwnerWatch(config)))


def _watch_node_labels(options: Options, stack: ExitStack) -> ApiMap[str, dict[str, str]] | None:
    """Returns the labels of nodes. They are used only by prices."""
    if not options.get("prices") or not _uses_api(options):
        return None
    try:
        config = load_config(options["kubeconfig"])
    except NoApi:
        # For example in a pod without a token. A note then says which prices are unknown.
        return None
    labels = ApiMap(config, NODES_PATH, parse_node_labels, "labels of nodes")
    return stack.enter_context(closing(labels))


def _watch_endpoints(options: Options, stack: ExitStack) -> ApiMap[PodName, PodEndpoint] | None:
    """Returns the addresses of pods, if the token counters are read from the pods."""
    if options.get("token_metrics") != "pods":
        return None
    with naming_option("--token-metrics pods"):
        config = load_config(options["kubeconfig"])
    endpoints = ApiMap(config, PODS_PATH, parse_endpoint, "addresses of pods", metadata_only=False)
    return stack.enter_context(closing(endpoints))


def _watch_queue(options: Options, stack: ExitStack, cluster: Cluster) -> QueueWatch:
    """Watches the pods that wait for GPUs."""
    with naming_option("--queue"):
        config = load_config(options["kubeconfig"])
    return stack.enter_context(closing(QueueWatch(config, lambda: cluster.published.state)))


def _watch_targets(options: Options, stack: ExitStack) -> KubernetesTargets:
    # These options have a meaning only for TLS.
    https = bool(options["exporter_ca_file"] or options["exporter_insecure_skip_verify"])
    selector = ServiceSelector.parse(options["discover_kubernetes"])
    targets = KubernetesTargets(load_config(options["kubeconfig"]), selector, https=https)
    return stack.enter_context(closing(targets))


def _prometheus_server(options: Options) -> PrometheusServer:
    headers = {}
    tenant = options["prometheus_tenant"]
    if tenant:
        headers["X-Scope-OrgID"] = tenant
    access = Access.from_options(options, "prometheus", **headers)
    return PrometheusServer(
        url=options["prometheus"],
        access=access,
        match=options["match"].strip(),
        node_labels=_split_node_label(options["node_label"]),
        cluster_label=options["cluster_label"],
        reads_tokens=options.get("token_metrics") != "none",
    )


def _uses_api(options: Options) -> bool:
    """Returns True if an API server is configured.

    Ignores ~/.kube/config, which may belong to another cluster.
    """
    if options["discover_kubernetes"] or options["kubeconfig"]:
        return True
    return "KUBERNETES_SERVICE_HOST" in os.environ


def _split_node_label(text: str) -> tuple[str, ...]:
    names = tuple(split_list(text))
    if not names:
        example = "Hostname,hostname,node,instance"
        raise UsageError(f"--node-label is empty: give at least one label, for example {example}")
    return names
