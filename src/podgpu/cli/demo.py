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
from podgpu.past.record import cluster_recorder
from podgpu.past.savings_watch import SavingsWatch
from podgpu.past.sqlite_past import SqlitePast
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
    read = read_prices(prices)
    with ExitStack() as stack:
        nodes = []
        for number, spec in enumerate([gpus, *OTHER_GPUS]):
            node = stack.enter_context(make_node(number, spec, Clock()))
            nodes.append(node)
            pods = len(node.kubelet.pods)
            content = f"{pods} pods" if pods else "a node without Kubernetes"
            click.echo(f"SIMULATED {node.name}: {spec}, {content}")

        exporters = [make_exporter(node, read) for node in nodes]
        # In parallel, because each exporter waits a second between its first two readings.
        with ThreadPoolExecutor(len(exporters)) as pool:
            list(pool.map(lambda exporter: exporter.agent.warm_up(), exporters))

        targets: list[str] = []
        engines = DemoEngines(nodes)
        make_collector = partial(
            ScrapeCollector,
            lambda: targets,
            CLUSTER,
            read_owners=partial(find_owners, nodes),
            make_engines=partial(EngineReader, engines.endpoints),
        )
        cluster = Cluster(make_collector, CLUSTER, read)
        recorder = cluster_recorder(cluster)
        write_past(exporters, recorder, read()[0], time.time())
        for exporter in exporters:
            exporter.agent.read_telemetry()  # the last values may be too old by now
        past = SqlitePast(recorder, lambda: cluster.published.state)
        savings = SavingsWatch(past)
        cluster.read_savings = savings.read
        app = cluster_application(cluster, past=past, read_queue=DemoQueue(nodes, cluster).read)

        services: list[Service] = []
        listeners = []
        for number, exporter in enumerate(exporters):
            services += [exporter.agent, exporter.recorder]
            where = address
            if number:
                # After the port of the cluster view, so that Prometheus can scrape the node.
                where = Address(address.host, address.port and address.port + 1 + number)
            listeners.append(Listener(exporter.application, where))
        services += [cluster, recorder, savings]
        listeners.append(Listener(engines.application, Address(_LOOPBACK, 0)))
        listeners.append(Listener(app, cluster_address, "--cluster-address"))

        script = [] if calm else make_script(nodes)
        stopping = threading.Event()
        stack.callback(stopping.set)

        def on_listening(bound: Sequence[Address]) -> None:
            *addresses, of_engines, of_cluster = bound
            engines.port = of_engines.port

            for where in addresses:
                targets.append(f"http://{where.host or _LOOPBACK}:{where.port}/metrics")
            _print_overview(nodes, [*addresses, of_cluster], script)
            log.setLevel(logging.NOTSET)
            arguments = (script, stopping)
            threading.Thread(target=perform, args=arguments, name="demo", daemon=True).start()

        run(services, listeners, on_listening)
    click.echo("demo ended")


def _print_overview(
    nodes: Sequence[DemoNode], bound: Sequence[Address], script: Sequence[Act]
) -> None:
    *addresses, cluster = bound
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
