"""KEDA's protocol over real gRPC, with a client of its messages, plain and with certificates."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from podgpu.autoscale import externalscaler_pb2 as pb
from podgpu.autoscale.keda import ExternalScaler, KedaCallers, KedaTls, KedaTlsFiles, start_scaler, stop_scaler
from podgpu.errors import StartError
from podgpu.tls import Pem
from podgpu.web.sockets import Address
from tests.autoscale.authorities import Authorities
from tests.autoscale.scenes import Stage, gpu, holder, pod

TRIGGER = {"scalerAddress": "x:1", "owner": "Deployment/inference", "target": "60", "window": "60s", "idleFor": "60s"}
SERVING = KedaCallers(by_certificate=False, namespaces=frozenset({"serving"}))


class Client:
    """What KEDA has of the service: its four methods."""

    def __init__(self, channel: Any) -> None:
        def unary(method: str, answer: Any) -> Any:
            path = f"/externalscaler.ExternalScaler/{method}"
            return channel.unary_unary(path, lambda message: message.SerializeToString(), answer.FromString)

        self.is_active = unary("IsActive", pb.IsActiveResponse)
        self.metric_spec = unary("GetMetricSpec", pb.GetMetricSpecResponse)
        self.metrics = unary("GetMetrics", pb.GetMetricsResponse)
        self.stream = channel.unary_stream(
            "/externalscaler.ExternalScaler/StreamIsActive",
            lambda message: message.SerializeToString(),
            pb.IsActiveResponse.FromString,
        )
        self.unknown = unary("StreamMetricSpec", pb.GetMetricSpecResponse)


@asynccontextmanager
async def serving(
    stage: Stage, callers: KedaCallers = SERVING, credentials: Any = None, **more: Any
) -> AsyncIterator[tuple[ExternalScaler, int]]:
    scaler = ExternalScaler(stage.store, callers, **more)
    server, bound = await start_scaler(scaler, Address("127.0.0.1", 0), credentials)
    try:
        yield scaler, bound.port
    finally:
        await stop_scaler(server)


@asynccontextmanager
async def connected(stage: Stage, callers: KedaCallers = SERVING, **more: Any) -> AsyncIterator[Client]:
    async with serving(stage, callers, **more) as (_, port), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Client(channel)


def ref(namespace: str = "serving", **changes: str) -> Any:
    return pb.ScaledObjectRef(name="inference", namespace=namespace, scalerMetadata={**TRIGGER, **changes})


def busy_stage(ratio: float = 0.75) -> Stage:
    stage = Stage([pod("a")])
    stage.turns(8, n1=(gpu(0, holder("a", utilization=ratio), utilization=ratio),))
    stage.now += 6.0
    return stage


def asked(stage: Stage, ask: Callable[[Client], Awaitable[Any]], **more: Any) -> Any:
    async def run() -> Any:
        async with connected(stage, **more) as client:
            return await ask(client)

    return asyncio.run(run())


def refused(stage: Stage, ask: Callable[[Client], Awaitable[Any]], **more: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        asked(stage, ask, **more)
    return raised.value.code(), raised.value.details() or ""


# What is answered


def test_the_four_calls_of_a_polling_interval() -> None:
    async def ask(client: Client) -> tuple[Any, ...]:
        spec = (await client.metric_spec(ref())).metricSpecs[0]
        value = (
            await client.metrics(pb.GetMetricsRequest(scaledObjectRef=ref(), metricName=spec.metricName))
        ).metricValues
        stream = client.stream(ref())
        first = await stream.read()
        stream.cancel()
        return spec, value[0], (await client.is_active(ref())).result, first.result

    spec, value, active, streamed = asked(busy_stage(), ask)
    assert (spec.metricName, spec.targetSize, spec.targetSizeFloat) == ("gpu_utilization", 60, 60.0)
    assert (value.metricName, value.metricValue) == ("gpu_utilization", 75)
    assert value.metricValueFloat == pytest.approx(75)
    assert active
    assert streamed


def test_a_small_value_is_never_zero_to_an_old_keda() -> None:
    def ask(client: Client) -> Awaitable[Any]:
        return client.metrics(pb.GetMetricsRequest(scaledObjectRef=ref(), metricName="s0-gpu_utilization"))

    value = asked(busy_stage(0.002), ask).metricValues[0]
    assert value.metricValue == 1
    assert value.metricValueFloat == pytest.approx(0.2)


def test_surely_idle_is_inactive() -> None:
    assert asked(busy_stage(0.0), lambda client: client.is_active(ref())).result is False
    assert asked(busy_stage(0.0), lambda client: client.is_active(ref(idleFor="10m"))).result is True


def test_the_spec_needs_no_figures() -> None:
    assert asked(Stage(), lambda client: client.metric_spec(ref())).metricSpecs[0].targetSizeFloat == 60


def test_a_stream_tells_when_it_changes_and_ends_when_nobody_knows() -> None:
    stage = busy_stage(0.0)
    turns: asyncio.Queue[None] = asyncio.Queue()

    async def sleep(_seconds: float) -> None:
        await turns.get()

    async def ask(client: Client) -> list[Any]:
        stream = client.stream(ref())
        told = [(await stream.read()).result]
        turns.put_nowait(None)  # nothing changes, nothing is told
        stage.now -= 6.0
        stage.turn(n1=(gpu(0, holder("a", utilization=0.5), utilization=0.5),))
        stage.now += 6.0
        turns.put_nowait(None)
        told.append((await stream.read()).result)
        stage.now += 1000.0
        turns.put_nowait(None)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stream.read()
        return [*told, raised.value.code()]

    assert asked(stage, ask, sleep=sleep) == [False, True, grpc.StatusCode.UNAVAILABLE]


# What is refused


@pytest.mark.fault(
    "no exporter answers (KEDA asks)", "UNAVAILABLE with the reason: never 0, never inactive; nothing is scaled"
)
@pytest.mark.parametrize("call", ["is_active", "metrics"])
def test_no_data_is_an_error(call: str) -> None:
    stage = busy_stage()
    stage.now -= 6.0
    stage.turns(5)  # nobody answers
    stage.now += 6.0

    def ask(client: Client) -> Awaitable[Any]:
        if call == "is_active":
            return client.is_active(ref())
        return client.metrics(pb.GetMetricsRequest(scaledObjectRef=ref()))

    code, details = refused(stage, ask)
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "a on n1, last read 75 s ago" in details


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"metric": "gpu_utilisation"}, "NOT_FOUND", "did you mean gpu_utilization?"),
        ({"owner": "", "selector": "app=nobody"}, "NOT_FOUND", "app=nobody"),
        ({"owner": "", "selector": "app in"}, "INVALID_ARGUMENT", "cannot parse"),
        ({"targt": "1"}, "INVALID_ARGUMENT", "did you mean target?"),
        ({"target": "0"}, "INVALID_ARGUMENT", "above 0"),
        ({"window": "1h"}, "INVALID_ARGUMENT", "--longest-window"),
    ],
)
def test_bad_input_has_its_status_and_a_reason(changes: dict[str, str], code: str, words: str) -> None:
    found, details = refused(busy_stage(), lambda client: client.is_active(ref(**changes)))
    assert found is grpc.StatusCode[code]
    assert words in details


def test_pods_without_a_gpu_are_not_found() -> None:
    stage = Stage([pod("web", asks=False)])
    stage.turn(n1=(gpu(0, holder("other", utilization=0.5)),))
    stage.now += 6.0
    assert refused(stage, lambda client: client.is_active(ref()))[0] is grpc.StatusCode.NOT_FOUND


def test_a_namespace_that_is_not_listed_is_not_answered() -> None:
    code, details = refused(busy_stage(), lambda client: client.metric_spec(ref("kube-system")))
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert "--keda-namespaces" in details


def test_the_cluster_is_not_answered_where_only_some_namespaces_are() -> None:
    code, details = refused(busy_stage(), lambda client: client.is_active(ref(owner="", scope="cluster")))
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert "--keda-namespaces" in details
    assert asked(busy_stage(), lambda client: client.is_active(ref(owner="", scope="namespace"))).result


def test_a_connection_does_not_stand_for_ever() -> None:
    async def run() -> grpc.ChannelConnectivity:
        scaler = ExternalScaler(busy_stage().store, SERVING)
        server, bound = await start_scaler(scaler, Address("127.0.0.1", 0), None, 0.1)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{bound.port}") as channel:
            await channel.channel_ready()
            await asyncio.wait_for(channel.wait_for_state_change(grpc.ChannelConnectivity.READY), 20)
            state = channel.get_state()
            assert (await Client(channel).is_active(ref())).result  # by a new one
        await stop_scaler(server)
        return state

    assert asyncio.run(run()) is not grpc.ChannelConnectivity.READY


@pytest.mark.fault(
    "hundreds connect to KEDA's listener and say nothing",
    "at most 256 are let in, for ten seconds; the probes keep their descriptors, and who asks is answered",
)
def test_strangers_who_say_nothing_are_not_let_in_without_end() -> None:
    async def run() -> int:
        async with (
            serving(busy_stage()) as (_, port),
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            assert (await Client(channel).is_active(ref())).result
            strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(300)]
            left = {asyncio.create_task(reader.read()) for reader, _ in strangers}
            try:
                async with asyncio.timeout(60):
                    while len(left) > 256:
                        _, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                assert (await Client(channel).is_active(ref())).result
            finally:
                for _, writer in strangers:
                    writer.transport.abort()
                await asyncio.gather(*left, return_exceptions=True)
        return len(left)

    assert asyncio.run(run()) <= 256


def test_another_metric_than_the_triggers_is_refused() -> None:
    question = pb.GetMetricsRequest(scaledObjectRef=ref(), metricName="gpu_power")
    assert refused(busy_stage(), lambda client: client.metrics(question))[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_a_method_of_later_kedas_is_unimplemented() -> None:
    assert refused(busy_stage(), lambda client: client.unknown(ref()))[0] is grpc.StatusCode.UNIMPLEMENTED


def test_bytes_that_are_no_message_are_refused_and_the_next_call_is_answered() -> None:
    async def run() -> bool:
        async with serving(busy_stage()) as (_, port), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            raw = channel.unary_unary("/externalscaler.ExternalScaler/IsActive")
            for garbage in (b"\xff\xff\xff", b"\n\x02\xff\xfe", b"x" * 100_000):
                with pytest.raises(grpc.aio.AioRpcError):
                    await raw(garbage)
            return bool((await Client(channel).is_active(ref())).result)

    assert asyncio.run(run())


def test_an_address_in_use_is_named() -> None:
    async def run() -> None:
        async with serving(Stage()) as (scaler, port):
            with pytest.raises(StartError, match=f"127.0.0.1:{port}.*--keda-address"):
                await start_scaler(scaler, Address("127.0.0.1", port), None)

    asyncio.run(run())


# Certificates


def files(authorities: Authorities, folder: Path) -> KedaTlsFiles:
    for name, copied in (("server.crt", "tls.crt"), ("server.key", "tls.key"), ("client-ca.crt", "ca.crt")):
        shutil.copy(authorities.path(name), folder / copied)
    certificate, key, ca = (Pem(file=str(folder / name)) for name in ("tls.crt", "tls.key", "ca.crt"))
    return KedaTlsFiles(certificate, key, ca)


async def ask_over_tls(port: int, authorities: Authorities, shows: str, namespace: str = "any") -> bool:
    credentials = grpc.ssl_channel_credentials(
        authorities.read("serving.crt"),
        authorities.read(f"{shows}.key") if shows else None,
        authorities.read(f"{shows}.crt") if shows else None,
    )
    options = (("grpc.ssl_target_name_override", "localhost"),)
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options) as channel:
        answer = await Client(channel).metric_spec(ref(namespace), timeout=30)
        return len(answer.metricSpecs) == 1


@pytest.mark.parametrize("shows", ["", "mallory", "late", "aggregator"])
def test_who_has_no_good_certificate_is_not_let_in(authorities: Authorities, tmp_path: Path, shows: str) -> None:
    async def run() -> None:
        tls = KedaTls(files(authorities, tmp_path))
        async with serving(Stage(), KedaCallers(by_certificate=True), tls.make_credentials()) as (_, port):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await ask_over_tls(port, authorities, shows)
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
            assert await ask_over_tls(port, authorities, "alice")

    asyncio.run(run())


def test_only_the_names_that_may_ask_do(authorities: Authorities, tmp_path: Path) -> None:
    async def run() -> grpc.StatusCode:
        tls = KedaTls(files(authorities, tmp_path))
        callers = KedaCallers(by_certificate=True, names=frozenset({"front-proxy-client"}))
        async with serving(Stage(), callers, tls.make_credentials()) as (_, port):
            assert await ask_over_tls(port, authorities, "aggregator-of-clients")
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await ask_over_tls(port, authorities, "alice")
            return raised.value.code()

    assert asyncio.run(run()) is grpc.StatusCode.PERMISSION_DENIED


def test_certificates_that_are_replaced_count_at_the_next_connection(authorities: Authorities, tmp_path: Path) -> None:
    async def run() -> None:
        tls = KedaTls(files(authorities, tmp_path))
        async with serving(Stage(), KedaCallers(by_certificate=True), tls.make_credentials()) as (_, port):
            assert await ask_over_tls(port, authorities, "alice")
            (tmp_path / "tls.key").write_text("half of a rotation")
            assert await ask_over_tls(port, authorities, "alice")
            shutil.copy(authorities.path("server.key"), tmp_path / "tls.key")
            shutil.copy(authorities.path("stranger.crt"), tmp_path / "ca.crt")
            with pytest.raises(grpc.aio.AioRpcError):
                await ask_over_tls(port, authorities, "alice")
            assert await ask_over_tls(port, authorities, "mallory")

    asyncio.run(run())
