"""KEDA's protocol over real gRPC, with and without certificates."""

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
from h2.connection import H2Connection
from h2.events import RemoteSettingsChanged
from h2.settings import SettingCodes

from podgpu.errors import StartError
from podgpu.scale import externalscaler_pb2 as pb
from podgpu.scale.keda import ExternalScaler, load_credentials
from podgpu.tls import Pem
from podgpu.web.app import Address
from tests.certificates import Certificates
from tests.scale.scenes import Stage, busy, pod

TRIGGER = {
    "scalerAddress": "x:1",
    "owner": "Deployment/inference",
    "target": "60",
    "window": "60s",
    "idleFor": "60s",
}


class Client:
    """The methods that KEDA calls."""

    def __init__(self, channel: Any) -> None:
        def unary(method: str, answer: Any) -> Any:
            path = f"/externalscaler.ExternalScaler/{method}"
            return channel.unary_unary(
                path, lambda message: message.SerializeToString(), answer.FromString
            )

        self.is_active = unary("IsActive", pb.IsActiveResponse)
        self.metric_spec = unary("GetMetricSpec", pb.GetMetricSpecResponse)
        self.metrics = unary("GetMetrics", pb.GetMetricsResponse)
        self.unknown = unary("StreamMetricSpec", pb.GetMetricSpecResponse)
        self.raw = channel.unary_unary("/externalscaler.ExternalScaler/IsActive")


@asynccontextmanager
async def serving(
    stage: Stage, tls: Any = None, names: frozenset[str] = frozenset()
) -> AsyncIterator[int]:
    """Yields the port."""
    scaler = ExternalScaler(stage.store, LOCAL, tls, names)
    bound = await scaler.start()
    try:
        yield bound.port
    finally:
        await scaler.stop()


LOCAL = Address("127.0.0.1", 0)


def call(stage: Stage, use: Callable[[Client], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with (
            serving(stage) as port,
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            return await use(Client(channel))

    return asyncio.run(run())


def refused(stage: Stage, use: Callable[[Client], Awaitable[Any]]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        call(stage, use)
    return raised.value.code(), raised.value.details() or ""


def ref(namespace: str = "serving", **changes: str) -> Any:
    return pb.ScaledObjectRef(
        name="inference", namespace=namespace, scalerMetadata={**TRIGGER, **changes}
    )


def request(metric: str = "") -> Any:
    return pb.GetMetricsRequest(scaledObjectRef=ref(), metricName=metric)


def make_stage(ratio: float = 0.75) -> Stage:
    stage = Stage([pod("a")])
    stage.turns(8, n1=(busy("a", ratio, 0),))
    stage.now += 6.0
    return stage


def test_the_calls_of_a_polling_interval() -> None:
    async def use(client: Client) -> tuple[Any, ...]:
        spec = (await client.metric_spec(ref())).metricSpecs[0]
        value = (await client.metrics(request(spec.metricName))).metricValues[0]
        return spec, value, (await client.is_active(ref())).result

    spec, value, active = call(make_stage(), use)
    assert (spec.metricName, spec.targetSize, spec.targetSizeFloat) == ("gpu_utilization", 60, 60.0)
    assert (value.metricName, value.metricValue) == ("gpu_utilization", 75)
    assert value.metricValueFloat == pytest.approx(75)
    assert active


def test_a_small_value_is_never_zero_for_an_old_keda() -> None:
    value = call(
        make_stage(0.002), lambda client: client.metrics(request("gpu_utilization"))
    ).metricValues[0]
    assert value.metricValue == 1
    assert value.metricValueFloat == pytest.approx(0.2)


def test_an_idle_workload_is_inactive() -> None:
    assert call(make_stage(0.0), lambda client: client.is_active(ref())).result is False
    assert call(make_stage(0.0), lambda client: client.is_active(ref(idleFor="10m"))).result is True


def test_the_spec_needs_no_values() -> None:
    assert (
        call(Stage(), lambda client: client.metric_spec(ref())).metricSpecs[0].targetSizeFloat == 60
    )


@pytest.mark.fault(
    "no exporter answers (KEDA polls)",
    "UNAVAILABLE with the reason: never 0, never inactive; nothing is scaled",
)
@pytest.mark.parametrize(
    "use", [lambda client: client.is_active(ref()), lambda client: client.metrics(request())]
)
def test_no_data_is_an_error(use: Callable[[Client], Awaitable[Any]]) -> None:
    stage = make_stage()
    stage.now -= 6.0
    stage.turns(5)
    stage.now += 6.0
    code, details = refused(stage, use)
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "a on n1, last read 75 s ago" in details


@pytest.mark.parametrize(
    ("use", "code", "text"),
    [
        (
            lambda client: client.is_active(ref(metric="gpu_utilisation")),
            "NOT_FOUND",
            "must be one of gpu_utilization",
        ),
        (
            lambda client: client.is_active(ref(owner="Deployment/none")),
            "NOT_FOUND",
            "Deployment serving/none",
        ),
        (
            lambda client: client.is_active(ref(targt="1")),
            "INVALID_ARGUMENT",
            "must be one of metric, target",
        ),
        (lambda client: client.unknown(ref()), "UNIMPLEMENTED", ""),
    ],
)
def test_a_wrong_request_has_its_status_and_a_reason(
    use: Callable[[Client], Awaitable[Any]], code: str, text: str
) -> None:
    found, details = refused(make_stage(), use)
    assert found is grpc.StatusCode[code]
    assert text in details


def test_malformed_messages_are_refused_and_the_next_call_is_answered() -> None:
    async def use(client: Client) -> bool:
        for garbage in (b"\xff\xff\xff", b"\n\x02\xff\xfe", b"x" * 100_000):
            with pytest.raises(grpc.aio.AioRpcError):
                await client.raw(garbage)
        return bool((await client.is_active(ref())).result)

    assert call(make_stage(), use)


async def test_an_address_in_use_is_named() -> None:
    async with serving(Stage()) as port:
        with pytest.raises(StartError, match=f"127.0.0.1:{port}.*--keda-address"):
            await ExternalScaler(Stage().store, Address("127.0.0.1", port)).start()


def make_tls(certificates: Certificates, folder: Path) -> Any:
    certificates.put("server", folder)
    shutil.copy(certificates.path("ca.crt"), folder / "ca.crt")
    return load_credentials(
        *(Pem(file=str(folder / name)) for name in ("tls.crt", "tls.key", "ca.crt"))
    )


async def call_over_tls(port: int, certificates: Certificates, shows: str) -> bool:
    credentials = grpc.ssl_channel_credentials(
        certificates.text("ca.crt").encode(),
        certificates.text(f"{shows}.key").encode() if shows else None,
        certificates.text(f"{shows}.crt").encode() if shows else None,
    )
    options = (("grpc.ssl_target_name_override", "api.test"),)
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options) as channel:
        answer = await Client(channel).metric_spec(ref("any"), timeout=30)
        return len(answer.metricSpecs) == 1


@pytest.mark.parametrize(
    ("shows", "code"),
    [
        ("", grpc.StatusCode.UNAVAILABLE),
        ("outsider", grpc.StatusCode.UNAVAILABLE),
        ("expired", grpc.StatusCode.UNAVAILABLE),
        ("scraper", grpc.StatusCode.PERMISSION_DENIED),
    ],
)
async def test_only_certificates_with_an_accepted_ca_and_name_are_answered(
    certificates: Certificates, tmp_path: Path, shows: str, code: grpc.StatusCode
) -> None:
    tls = make_tls(certificates, tmp_path)
    async with serving(Stage(), tls, frozenset({"client"})) as port:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call_over_tls(port, certificates, shows)
        assert raised.value.code() is code
        assert await call_over_tls(port, certificates, "client")


async def test_replaced_certificates_are_used_for_new_connections(
    certificates: Certificates, tmp_path: Path
) -> None:
    tls = make_tls(certificates, tmp_path)
    async with serving(Stage(), tls) as port:
        assert await call_over_tls(port, certificates, "client")
        (tmp_path / "tls.key").write_text("half of a rotation")
        assert await call_over_tls(port, certificates, "client")
        shutil.copy(certificates.path("server.key"), tmp_path / "tls.key")
        shutil.copy(certificates.path("stranger.crt"), tmp_path / "ca.crt")
        with pytest.raises(grpc.aio.AioRpcError):
            await call_over_tls(port, certificates, "client")
        assert await call_over_tls(port, certificates, "outsider")


@pytest.mark.fault(
    "300 clients connect to KEDA's listener and do not start the TLS handshake",
    "KEDA is answered, and their connections are closed after 3 seconds",
)
async def test_keda_is_answered_beside_silent_connections(
    certificates: Certificates, tmp_path: Path
) -> None:
    tls = make_tls(certificates, tmp_path)
    async with serving(Stage(), tls) as port:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(300)]
        assert await call_over_tls(port, certificates, "client")
        async with asyncio.timeout(60):
            await asyncio.gather(*(reader.read() for reader, _ in silent), return_exceptions=True)
        for _, writer in silent:
            writer.transport.abort()


async def test_streams_and_headers_of_a_connection_are_limited(
    certificates: Certificates, tmp_path: Path
) -> None:
    """A compressed header can become large: 20 connections with 100 streams each needed 900 MB."""
    own_tls = make_tls(certificates, tmp_path)
    tls = certificates.client("client")
    tls.set_alpn_protocols(["h2"])
    async with serving(Stage(), own_tls) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
        client = H2Connection()
        client.initiate_connection()
        writer.write(client.data_to_send())
        settings: dict[int, int] = {}
        while not settings:
            events = client.receive_data(await reader.read(65536))
            changed = (
                event.changed_settings
                for event in events
                if isinstance(event, RemoteSettingsChanged)
            )
            settings = {
                code: each.new_value for settings in changed for code, each in settings.items()
            }
        writer.transport.abort()
    assert settings[SettingCodes.MAX_CONCURRENT_STREAMS] == 10
    assert settings[SettingCodes.MAX_HEADER_LIST_SIZE] <= 8192
