"""Token counters from the pods that hold GPUs, over real HTTP."""

from __future__ import annotations

import asyncio
import gzip
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from podgpu.charge import Tokens
from podgpu.clock import Clock
from podgpu.fleet.parts import EngineState
from podgpu.fleet.read.engine_reader import RETRY_SECONDS, EngineReader, Place, list_places
from podgpu.http_client import open_session
from podgpu.kube.objects import ContainerPort, PodEndpoint, parse_endpoint
from tests.net import free_port
from tests.nodes.clock import PATIENCE

NAME = ("ml", "chat", "main")
BOTH = ["/metrics", "/prometheus/metrics", "/v1/metrics"]
SHORT = 2.0  # timeout of requests that time out
HUGE = b"x" * 3_000_000
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def vllm(prompt: float, generated: float, model: str = "llama", more: str = "") -> str:
    labels = f'{{engine="0",model_name="{model}"}}'
    return (
        f"vllm:prompt_tokens_total{labels} {prompt}\n"
        f"vllm:generation_tokens_total{labels} {generated}\n{more}"
    )


@dataclass
class Pod:
    """An HTTP server that stands for a pod's engine. Its answer may be changed."""

    text: str | bytes = ""
    path: str = "/metrics"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    hangs: bool = False
    port: int = 0
    requests: list[str] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append(request.path)
        if self.hangs:
            await asyncio.sleep(60)
        if request.path != self.path:
            return web.Response(status=404)
        return web.Response(body=self.text, status=self.status, headers=self.headers)

    @property
    def endpoint(self) -> PodEndpoint:
        return PodEndpoint("127.0.0.1", (ContainerPort("main", "http", self.port),))


@asynccontextmanager
async def serving(*pods: Pod) -> AsyncIterator[None]:
    runners = []
    for pod in pods:
        app = web.Application()
        app.router.add_get("/{path:.*}", pod.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        pod.port = runner.addresses[0][1]
        runners.append(runner)
    try:
        yield
    finally:
        await asyncio.gather(*(runner.cleanup() for runner in runners))


class Reading:
    """Reads engines in rounds. Waits until no container is being looked at for the first time."""

    def __init__(self, timeout: float = PATIENCE) -> None:
        self.at = 0.0
        self.endpoints: dict[tuple[str, str], PodEndpoint] = {}
        self.held = [NAME]
        clock = Clock(monotonic=lambda: self.at, wall=lambda: self.at)
        self.reader = EngineReader(lambda: self.endpoints, clock, timeout)

    async def round(self, session: Any, seconds: float = 15.0) -> EngineState:
        self.at += seconds
        await self.reader.read(session, self.held)
        async with asyncio.timeout(PATIENCE):
            while any(watched.probe for watched in self.reader._watched.values()):
                await asyncio.sleep(0.02)
        return self.reader.states[NAME]


def run(
    pod: Pod, rounds: Callable[[Reading, Any], Awaitable[None]], timeout: float = PATIENCE
) -> None:
    async def main() -> None:
        async with serving(pod), open_session() as session:
            reading = Reading(timeout)
            reading.endpoints["ml", "chat"] = pod.endpoint
            try:
                await rounds(reading, session)
            finally:
                await reading.reader.close()

    asyncio.run(main())


def test_tokens_are_counted_from_the_first_reading_on() -> None:
    pod = Pod(vllm(1000, 500, more="vllm:num_requests_running 3\nvllm:num_requests_waiting 7\n"))

    async def rounds(reading: Reading, session: Any) -> None:
        first = await reading.round(session)
        assert (first.engine, first.models, first.counted) == ("vllm", ("llama",), Tokens())
        assert (first.per_second, first.running, first.waiting) == (None, 3.0, 7.0)
        pod.text = vllm(1300, 650)
        second = await reading.round(session)
        assert second.counted == Tokens(300.0, 150.0)
        assert second.per_second == Tokens(20.0, 10.0)
        assert (second.running, second.reason) == (None, "")
        pod.text = vllm(1301, 651)
        assert (await reading.round(session)).counted == Tokens(301.0, 151.0)
        assert pod.requests == ["/metrics"] * 3

    run(pod, rounds)


@pytest.mark.fault("an LLM engine restarts", "its counters go on from 0")
def test_an_engine_that_restarts() -> None:
    pod = Pod(vllm(1000, 500))

    async def rounds(reading: Reading, session: Any) -> None:
        await reading.round(session)
        pod.text = vllm(40, 20)
        assert (await reading.round(session)).counted == Tokens(40.0, 20.0)

    run(pod, rounds)


def test_a_model_that_is_missing_once_does_not_count_again() -> None:
    pod = Pod(vllm(100, 100, "a") + vllm(50, 50, "b"))

    async def rounds(reading: Reading, session: Any) -> None:
        await reading.round(session)
        pod.text = vllm(110, 110, "a")
        state = await reading.round(session)
        assert (state.models, state.counted) == (("a",), Tokens(10.0, 10.0))
        pod.text = vllm(110, 110, "a") + vllm(57, 53, "b")
        assert (await reading.round(session)).counted == Tokens(17.0, 13.0)
        pod.text = vllm(110, 110, "a")
        await reading.round(session)
        # It was unloaded and loaded again.
        pod.text = vllm(110, 110, "a") + vllm(4, 2, "b")
        assert (await reading.round(session)).counted == Tokens(21.0, 15.0)

    run(pod, rounds)


def test_an_engine_that_names_new_models_all_the_time_is_forgotten() -> None:
    """A hostile engine must not fill the memory: of its models, the latest count."""
    pod = Pod(vllm(1, 1, "m0"))

    async def rounds(reading: Reading, session: Any) -> None:
        await reading.round(session)
        for number in range(1, 17):
            pod.text = vllm(1, 1, f"m{number}")
            await reading.round(session)
        pod.text = vllm(1, 1, "m0")
        assert (await reading.round(session)).counted == Tokens(17.0, 17.0)

    run(pod, rounds)


def test_an_engine_that_wants_a_login() -> None:
    pod = Pod(status=401)

    async def rounds(reading: Reading, session: Any) -> None:
        state = await reading.round(session)
        assert state.reason == "unauthorized"
        assert "podgpu sends no credentials to pods" in state.message

    run(pod, rounds)


def test_the_path_of_each_engine_is_found_once() -> None:
    text = 'generation_tokens_total{model_name="m"} 1\nprompt_tokens_total{model_name="m"} 1\n'
    pod = Pod(text, path="/v1/metrics")

    async def rounds(reading: Reading, session: Any) -> None:
        assert (await reading.round(session)).engine == "nim"
        await reading.round(session)
        assert pod.requests == [*BOTH, "/v1/metrics"]

    run(pod, rounds)


def test_the_time_to_the_first_token_is_that_of_the_last_minutes() -> None:
    bucket = 'vllm:time_to_first_token_seconds_bucket{{le="{}"}} {}\n'

    def text(fast: int, every: int) -> str:
        return vllm(1, 1, more=bucket.format("0.1", fast) + bucket.format("+Inf", every))

    pod = Pod(text(1000, 1000))

    async def rounds(reading: Reading, session: Any) -> None:
        assert (await reading.round(session)).first_token_seconds is None
        pod.text = text(1010, 1010)
        assert (await reading.round(session)).first_token_seconds == pytest.approx(0.095)
        for _ in range(25):
            await reading.round(session)
        pod.text = text(1010, 1011)
        slower = await reading.round(session)
        assert slower.first_token_seconds == 0.1
        assert slower.first_token_before_seconds == pytest.approx(0.095), "rose in these minutes"
        for _ in range(150):
            await reading.round(session)
        assert (await reading.round(session)).first_token_before_seconds is None
        pod.text = text(1, 1)
        restarted = await reading.round(session)
        assert restarted.first_token_seconds is None
        assert restarted.first_token_before_seconds is None

    run(pod, rounds)


@pytest.mark.fault(
    "a pod's metrics are huge, slow, a web page or redirected",
    "the pod's page shows the reason; it is tried again after 5 minutes",
)
@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (Pod(HUGE), "too_large"),
        (Pod("<html>"), "not_metrics"),
        (Pod("up 1\n"), "no_tokens"),
        (Pod(status=302, headers={"Location": "/v1/metrics"}), "http_302"),
        (Pod(hangs=True), "timeout"),
        (Pod(path="/none"), "http_404"),
        (Pod("vllm:generation_tokens_total NaN\n"), "bad_value"),
    ],
)
def test_an_unusable_pod_is_left_alone_for_five_minutes(wrong: Pod, reason: str) -> None:
    async def rounds(reading: Reading, session: Any) -> None:
        state = await reading.round(session)
        assert state.reason == reason
        assert state.engine == ""
        asked = len(wrong.requests)
        assert asked == (1 if reason == "timeout" else 3), "a silent port is asked once"
        assert (await reading.round(session, RETRY_SECONDS - 1)).reason == reason
        assert len(wrong.requests) == asked
        wrong.text, wrong.hangs, wrong.path, wrong.status = vllm(1, 1), False, "/metrics", 200
        assert (await reading.round(session, 1.0)).engine == "vllm"

    run(wrong, rounds, SHORT if reason == "timeout" else PATIENCE)


def test_an_engine_that_stops_answering_keeps_what_it_counted() -> None:
    pod = Pod(vllm(10, 10))

    async def rounds(reading: Reading, session: Any) -> None:
        await reading.round(session)
        pod.text = vllm(11, 12)
        await reading.round(session)
        pod.status = 500
        failed = await reading.round(session)
        assert (failed.reason, failed.counted, failed.engine) == ("http_500", (1.0, 2.0), "vllm")
        assert (failed.per_second, failed.running) == (None, None)
        pod.status, pod.text = 200, vllm(20, 20)
        assert (await reading.round(session)).counted == Tokens(10.0, 10.0)
        pod.status = 500
        for _ in range(3):
            await reading.round(session)
        asked = len(pod.requests)
        await reading.round(session)
        assert len(pod.requests) == asked, "after three failures, it is left alone"
        pod.status, pod.text = 200, vllm(30, 30)
        assert (await reading.round(session, RETRY_SECONDS)).counted == Tokens(20.0, 20.0)

    run(pod, rounds)


def test_an_impossible_increase_is_not_counted() -> None:
    pod = Pod(vllm(0, 0))

    async def rounds(reading: Reading, session: Any) -> None:
        await reading.round(session)
        pod.text = vllm(1.4e8, 0.2e8)
        state = await reading.round(session)
        assert (state.reason, state.counted) == ("impossible", Tokens())
        pod.text = vllm(1.5e8, 0.2e8)
        assert (await reading.round(session)).counted == Tokens(1e7, 0.0)

    run(pod, rounds)


def test_pods_without_an_address_or_that_refuse() -> None:
    pod = Pod(vllm(0, 0))

    async def rounds(reading: Reading, session: Any) -> None:
        reading.endpoints["ml", "chat"] = pod.endpoint._replace(is_refused=True)
        assert (await reading.round(session)).reason == "refused"
        reading.endpoints.clear()
        assert (await reading.round(session)).reason == "no_address"
        assert pod.requests == []
        reading.endpoints["ml", "chat"] = PodEndpoint(
            "127.0.0.1", (ContainerPort("main", "", free_port()),)
        )
        assert (await reading.round(session)).reason == "unreachable"

    run(pod, rounds)


def test_a_pod_that_no_longer_holds_a_gpu_is_forgotten() -> None:
    pod = Pod(vllm(5, 5))

    async def rounds(reading: Reading, session: Any) -> None:
        await reading.round(session)
        reading.held = []
        with pytest.raises(KeyError):
            await reading.round(session)
        assert len(pod.requests) == 1

    run(pod, rounds)


# Where an engine may answer


def ports(*numbers: int, container: str = "main") -> tuple[ContainerPort, ...]:
    return tuple(ContainerPort(container, "", number) for number in numbers)


def numbers(places: list[Place]) -> list[int]:
    return list(dict.fromkeys(place.port for place in places))


def test_annotations_come_first_then_named_ports_then_others() -> None:
    declared = (*ports(8080), ContainerPort("main", "metrics", 9000))
    endpoint = PodEndpoint("10.0.0.1", declared, 9100, "/stats")
    places = list_places(endpoint, "main", True)
    assert places[0] == ("10.0.0.1", 9100, "/stats")
    assert numbers(places) == [9100, 9000, 8080]
    assert [place.path for place in places[1:4]] == BOTH
    assert places[0].url == "http://10.0.0.1:9100/stats"
    assert Place("fd00::1", 80, "/").url == "http://[fd00::1]:80/"


def test_without_declared_ports_the_known_ones_are_tried() -> None:
    known = [8000, 30000, 8002, 80, 8080]
    assert numbers(list_places(PodEndpoint("10.0.0.1"), "main", True)) == known
    sidecar = PodEndpoint("10.0.0.1", ports(8000, container="proxy"))
    assert numbers(list_places(sidecar, "main", True)) == known[1:]


def test_two_containers_of_a_pod_never_read_the_same_port() -> None:
    endpoint = PodEndpoint("10.0.0.1", ports(8001, container="b"), 8001)
    assert 8001 not in numbers(list_places(endpoint, "a", True))
    assert numbers(list_places(endpoint, "b", False)) == [8001]
    assert list_places(endpoint._replace(ports=()), "b", False) == []
    assert len(numbers(list_places(PodEndpoint("::1", ports(*range(1, 99))), "main", True))) == 6


def body(**more: Any) -> dict[str, Any]:
    container = {"name": "main", "ports": [{"containerPort": 8000, "name": "http"}]}
    udp = {"name": "other", "ports": [{"containerPort": 53, "protocol": "UDP"}]}
    return {
        "metadata": {"name": "chat", "namespace": "ml", **more},
        "spec": {"containers": [container, udp, {"name": "none"}]},
        "status": {"podIP": "10.0.0.1"},
    }


def test_the_endpoint_of_a_pod() -> None:
    assert parse_endpoint(body()) == (
        ("ml", "chat"),
        PodEndpoint("10.0.0.1", (ContainerPort("main", "http", 8000),)),
    )
    assert parse_endpoint(body() | {"status": {}}) is None

    def annotated(**annotations: str) -> PodEndpoint:
        named = {name.replace("__", "/").replace("_", "."): at for name, at in annotations.items()}
        found = parse_endpoint(body(annotations=named))
        assert found is not None
        return found[1]

    plain = annotated(prometheus_io__port="8081", prometheus_io__path="/x?y=1")
    assert (plain.metrics_port, plain.metrics_path) == (8081, "/x?y=1")
    kserve = annotated(prometheus_kserve_io__port="9", prometheus_io__port="8")
    assert kserve.metrics_port == 9
    wrong = annotated(prometheus_io__port="8000@x", prometheus_io__path="x y")
    assert (wrong.metrics_port, wrong.metrics_path) == (0, "")
    assert annotated(prometheus_io__scrape="False").is_refused
    assert not annotated(prometheus_io__scrape="true").is_refused


def test_the_recorded_text_of_a_real_engine() -> None:
    recorded = Path(__file__).parent.parent / "fixtures/engines/vllm-0.32.0.prom"
    pod = Pod(recorded.read_bytes())

    async def rounds(reading: Reading, session: Any) -> None:
        state = await reading.round(session)
        assert (state.engine, state.models, state.reason) == ("vllm", ("tiny-llama",), "")

    run(pod, rounds)


# One hostile pod beside a good one


async def _drip(request: web.Request) -> web.StreamResponse:
    """Sends a byte every 0.2 s, so that no single read times out."""
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(300):
        await response.write(b"#")
        await asyncio.sleep(0.2)
    return response


async def _never_end(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    line = b'vllm:generation_tokens_total{model_name="m"} 1\n' * 1000
    while True:
        await response.write(line)


async def _inflate(request: web.Request) -> web.StreamResponse:
    """A small compressed answer of 20 MB."""
    return web.Response(body=_COMPRESSED, headers={"Content-Encoding": "gzip"})


async def _redirect(request: web.Request) -> web.StreamResponse:
    raise web.HTTPFound("http://127.0.0.1:1/secret")


def _answer(text: str) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(text=text)

    return handler


def _alternate(*texts: str) -> Handler:
    answers = itertools.cycle(texts)

    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(text=next(answers))

    return handler


_COMPRESSED = gzip.compress(b"\n" * 20_000_000, 1)
_SERIES = "".join(f'vllm:generation_tokens_total{{engine="{n}"}} 1\n' for n in range(30_000))


def test_a_round_does_not_wait_for_the_first_answer_of_a_pod() -> None:
    async def main() -> None:
        good, silent = Pod(vllm(100, 100)), Pod(hangs=True)
        async with serving(good, silent), open_session() as session:
            reading = Reading()
            reading.endpoints["ml", "chat"] = good.endpoint
            await reading.round(session)
            reading.endpoints["ml", "new"] = silent.endpoint
            reading.held.append(("ml", "new", "main"))
            good.text = vllm(101, 102)
            reading.at += 15.0
            await reading.reader.read(session, reading.held)
            assert reading.reader.states[NAME].counted == Tokens(1, 2)
            assert reading.reader.states["ml", "new", "main"].reason == ""
            await reading.reader.close()

    asyncio.run(main())


@pytest.mark.fault(
    "a pod's metrics are hostile or wrong",
    "the other engines are counted as before, and a round does not wait longer",
)
@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        pytest.param(_drip, "timeout", id="one byte at a time"),
        pytest.param(_never_end, "too_large", id="endless"),
        pytest.param(_inflate, "too_large", id="compressed"),
        pytest.param(_redirect, "http_302", id="redirected"),
        pytest.param(_answer(_SERIES), "too_many_series", id="many series"),
        pytest.param(_answer(vllm(1, 1) + "x" * 3_000_000), "too_large", id="huge"),
        pytest.param(_answer("<html>"), "not_metrics", id="web page"),
        pytest.param(_answer(vllm(1, float("nan"))), "bad_value", id="NaN"),
        pytest.param(_answer("dynamo_frontend_output_tokens_total 5\n"), "no_tokens", id="other"),
        pytest.param(
            _answer(vllm(1, 1) + "sglang:generation_tokens_total 1\n"),
            "several_engines",
            id="two engines",
        ),
        pytest.param(_alternate(vllm(9e15, 9e15), vllm(0, 0)), "", id="falling"),
    ],
)
def test_a_hostile_pod_changes_nothing_for_others(handler: Handler, reason: str) -> None:
    async def main() -> None:
        app = web.Application()
        app.router.add_get("/{path:.*}", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        good = Pod(vllm(100, 100))
        async with serving(good), open_session() as session:
            reading = Reading(SHORT if reason == "timeout" else PATIENCE)
            bad = ("evil", "bad", "main")
            reading.held.append(bad)
            reading.endpoints["ml", "chat"] = good.endpoint
            ports = (ContainerPort("main", "http", port),)
            reading.endpoints["evil", "bad"] = PodEndpoint("127.0.0.1", ports)
            await reading.round(session)
            for number in (1, 2, 3):
                good.text = vllm(100 + number, 100 + 2 * number)
                state = await reading.round(session)
                assert state.counted == Tokens(number, 2 * number)
            found = reading.reader.states[bad]
            assert found.reason == reason
            assert sum(found.counted) == 0
            assert bool(found.message) == bool(reason)
            await reading.reader.close()
        await runner.cleanup()

    asyncio.run(main())
