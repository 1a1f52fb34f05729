"""`podgpu demo`: runs exporters with simulated GPUs, and the cluster view."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import click

from podgpu.cli.options import make_command
from podgpu.cli.terminal import configure_logging
from podgpu.clock import Clock
from podgpu.fleet.prices import read_prices
from podgpu.fleet.read.engine_reader import EngineReader
from podgpu.fleet.read.scrape import ScrapeCollector
from podgpu.fleet.round import Cluster
from podgpu.labs.demo import (
    CLUSTER,
    CYCLE_SECONDS,
    OTHER_GPUS,
    Act,
    DemoExporter,
    find_owners,
    make_exporter,
    make_node,
    make_script,
    schedule,
)
from podgpu.labs.demo_engines import DemoEngines
from podgpu.labs.demo_past import write_past
from podgpu.labs.demo_queue import DemoQueue
from podgpu.labs.simulate.simulated_node import DemoNode
from podgpu.past.books.record import cluster_recorder
from podgpu.past.savings_watch import SavingsWatch
from podgpu.past.sqlite.sqlite_past import SqlitePast
from podgpu.web.app import Address, Listener, Service, run
from podgpu.web.cluster_app import cluster_application

_LOOPBACK = "127.0.0.1"


@make_command(
    "demo",
    ("podgpu demo", "open http://localhost:9401/ in a browser"),
    ("podgpu demo --calm", "the same without faults"),
    ("podgpu top --cluster localhost:9401", "in a second terminal: show the demo as a table"),
)
def command(address: Address, cluster_address: Address, gpus: str, calm: bool, prices: str) -> None:
    """Run exporters on SIMULATED GPUs, three with simulated kubelets and one without Kubernetes,
    and the cluster view.

    Needs no GPU and no cluster. Within a minute, a job ends, a GPU reports an XID error, another
    falls off the bus and a node goes down. After two minutes everything works again. --calm turns
    this off.
    """
    configure_logging("text", debug=False)
    log = logging.getLogger("podgpu")
    # Simulated GPUs without some values would fill the screen before the addresses.
    log.setLevel(logging.ERROR)
    read_price_file = read_prices(prices)
    with ExitStack() as stack:
        nodes = _make_nodes([gpus, *OTHER_GPUS], stack)
        exporters = [make_exporter(node, read_price_file) for node in nodes]
        _warm_up(exporters)

        # Filled when the exporters listen, because only then are their ports known.
        targets: list[str] = []
        engines = DemoEngines(nodes)
        make_collector = partial(
            ScrapeCollector,
            lambda: targets,
            CLUSTER,
            read_owners=partial(find_owners, nodes),
            make_engines=partial(EngineReader, engines.endpoints),
        )
        cluster = Cluster(make_collector, CLUSTER, read_price_file)
        recorder = cluster_recorder(cluster)
        price_list, _ = read_price_file()
        write_past(exporters, recorder, price_list, time.time())
        # Writing takes so long that the last values may be too old by now.
        for exporter in exporters:
            exporter.agent.read_telemetry()

        past = SqlitePast(recorder, lambda: cluster.published.state)
        savings = SavingsWatch(past)
        cluster.read_savings = savings.read
        app = cluster_application(cluster, past=past, read_queue=DemoQueue(nodes, cluster).read)

        services: list[Service] = []
        listeners = []
        for number, exporter in enumerate(exporters):
            services += [exporter.agent, exporter.recorder]
            listeners.append(Listener(exporter.application, _choose_address(address, number)))

        services += [cluster, recorder, savings]
        listeners.append(Listener(engines.application, Address(_LOOPBACK, 0)))
        listeners.append(Listener(app, cluster_address, "--cluster-address"))

        script = [] if calm else make_script(nodes)
        stopping = threading.Event()
        stack.callback(stopping.set)

        def on_listening(bound: Sequence[Address]) -> None:
            # In the order of `listeners`.
            *node_addresses, engines_address, bound_cluster = bound
            engines.port = engines_address.port
            for node_address in node_addresses:
                host = node_address.host or _LOOPBACK
                targets.append(f"http://{host}:{node_address.port}/metrics")

            _print_overview(nodes, node_addresses, bound_cluster, script)
            log.setLevel(logging.NOTSET)
            arguments = (script, stopping)
            threading.Thread(target=perform, args=arguments, name="demo", daemon=True).start()

        run(services, listeners, on_listening)
    click.echo("demo ended")


def _make_nodes(specs: Sequence[str], stack: ExitStack) -> list[DemoNode]:
    """Makes and prints a node for each spec, such as `8xH100`. The stack closes them."""
    nodes = []
    for number, spec in enumerate(specs):
        node = stack.enter_context(make_node(number, spec, Clock()))
        nodes.append(node)
        pods = len(node.kubelet.pods)
        content = f"{pods} pods" if pods else "a node without Kubernetes"
        click.echo(f"SIMULATED {node.name}: {spec}, {content}")
    return nodes


def _warm_up(exporters: Sequence[DemoExporter]) -> None:
    # In parallel, because each exporter waits a second between its first two readings.
    with ThreadPoolExecutor(len(exporters)) as pool:
        warm_ups = [pool.submit(exporter.agent.warm_up) for exporter in exporters]
    # Raises the error of a failed one.
    for warm_up in warm_ups:
        warm_up.result()


def _choose_address(address: Address, number: int) -> Address:
    """Returns where the exporter of the node with this number listens."""
    # Port 0 is any free port.
    if number == 0 or address.port == 0:
        return address
    # The next port is that of the cluster view. The others are fixed for Prometheus.
    return Address(address.host, address.port + 1 + number)


def _print_overview(
    nodes: Sequence[DemoNode], addresses: Sequence[Address], cluster: Address, script: Sequence[Act]
) -> None:
    click.echo("All values come from a simulated driver.\n")
    _print_address("the cluster", cluster)
    for node, address in zip(nodes, addresses, strict=True):
        _print_address(node.name, address)

    podgpu = os.path.relpath(sys.argv[0]) if sys.argv[0].endswith("/podgpu") else "podgpu"
    click.echo(f"  a terminal     {podgpu} top --cluster {cluster.url}\n")

    if script:
        click.echo(f"Events, repeated every {CYCLE_SECONDS:.0f} s (turn them off with --calm):")
        for act in script:
            click.echo(f"  {act.at:4.0f} s  {act.message}")
    click.echo("Ctrl-C ends the demo.")


def _print_address(name: str, address: Address) -> None:
    click.echo(f"  {name:13}  {address.url}/          a page; {address.url}/metrics")


def perform(script: Sequence[Act], stopping: threading.Event) -> None:
    began = time.monotonic()
    for at, act in schedule(script):
        if stopping.wait(max(0.0, began + at - time.monotonic())):
            return
        act.do()
        click.echo(f"demo: {act.message}")
