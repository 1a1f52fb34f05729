"""This module serves KEDA's external scaler protocol over gRPC: who may ask, and what a refusal is as a status.

What a caller says of itself is a claim: only a certificate of KEDA's makes its namespaces count. Without one, those
namespaces are answered that the person who runs podgpu has named, and nobody but this machine can connect.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from podgpu.autoscale import externalscaler_pb2 as pb
from podgpu.autoscale.questions import figure_of, is_active
from podgpu.autoscale.refusal import Kind, Refusal, bad_request, quoted
from podgpu.autoscale.scene import Store
from podgpu.autoscale.trigger import Trigger, parse_trigger
from podgpu.errors import StartError
from podgpu.web.sockets import Address

SERVICE = "externalscaler.ExternalScaler"
_STATUS = {
    Kind.BAD_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    Kind.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    Kind.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Kind.NO_DATA: grpc.StatusCode.UNAVAILABLE,
}
_MOST_STREAMS = 2000
_MOST_CONNECTIONS = 256
"""KEDA has one, or one for each of its replicas. Each stranger takes a descriptor, and the probes need some, too."""
_OPTIONS = (
    ("grpc.max_receive_message_length", 64 * 1024),
    ("grpc.so_reuseport", 0),  # a second podgpu on the same address is a mistake, and to be told so
    ("grpc.max_allowed_incoming_connections", _MOST_CONNECTIONS),
    ("grpc.server_handshake_timeout_ms", 10_000),  # gRPC would wait two minutes for the first byte
    ("grpc.max_connection_idle_ms", 600_000),
    ("grpc.max_connection_age_grace_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)
_CONNECTION_SECONDS = 3600.0
"""After which a caller has to show its certificate anew: it may have been withdrawn, or have expired."""
_GRACE_SECONDS = 1.0
_OLD_PREFIX = re.compile(r"^s\d{1,4}-")
"""What KEDA calls the metric towards the HPA; it should be gone before it comes here."""


@dataclass(frozen=True, slots=True)
class Callers:
    """Who is answered."""

    by_certificate: bool
    """Everybody who got this far has shown a certificate of the given authority."""
    names: frozenset[str] = frozenset()
    """Of which a certificate must have one; none: any of that authority."""
    namespaces: frozenset[str] = frozenset()
    """Without certificates: those that are answered."""

    def check(self, namespace: str, shown: frozenset[str]) -> None:
        """`shown`: names in the caller's certificate. Raises Refusal."""
        if self.by_certificate:
            if self.names and not self.names & shown:
                raise Refusal(
                    Kind.FORBIDDEN,
                    f"the certificate of {', '.join(sorted(shown)) or 'nobody'} has none of the names that may ask: "
                    "see --keda-client-name",
                )
        elif namespace not in self.namespaces:
            raise Refusal(
                Kind.FORBIDDEN,
                f"namespace {quoted(namespace)} is not answered: without a client certificate anybody could name any, "
                "so that only those of --keda-namespaces are",
            )

    def check_cluster(self) -> None:
        """A question is about all namespaces. Raises Refusal."""
        if not self.by_certificate:
            raise Refusal(
                Kind.FORBIDDEN,
                "scope cluster is about every namespace, and without a client certificate only those of "
                "--keda-namespaces are answered: write scope: namespace, or give the listener certificates",
            )


class ExternalScaler(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Every call is answered from the store, on the event loop: no call waits for the world."""

    def __init__(
        self, store: Store, callers: Callers, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._store = store
        self._callers = callers
        self._sleep = sleep
        self._streams = 0
        self.calls: Counter[tuple[str, str]] = Counter()
        """(method, status) -> how often."""

    def service(self, call: Any) -> Any:
        """gRPC asks here for the handler of a method; None is Unimplemented."""
        methods = {
            "IsActive": (self._is_active, pb.ScaledObjectRef),
            "GetMetricSpec": (self._metric_spec, pb.ScaledObjectRef),
            "GetMetrics": (self._metrics, pb.GetMetricsRequest),
        }
        service, _, method = call.method.removeprefix("/").partition("/")
        if service != SERVICE:
            return None
        if method == "StreamIsActive":
            return grpc.unary_stream_rpc_method_handler(
                self._stream, pb.ScaledObjectRef.FromString, pb.IsActiveResponse.SerializeToString
            )
        if method not in methods:
            return None
        answer, request = methods[method]
        return grpc.unary_unary_rpc_method_handler(
            self._counted(method, answer), request.FromString, lambda message: message.SerializeToString()
        )

    def _counted(self, method: str, answer: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Awaitable[Any]]:
        async def handle(request: Any, context: Any) -> Any:
            try:
                message = answer(request, context)
            except Refusal as error:
                await self._refuse(method, error, context)
            else:
                self.calls[method, "OK"] += 1
                return message

        return handle

    async def _refuse(self, method: str, error: Refusal, context: Any) -> None:
        code = _STATUS[error.kind]
        self.calls[method, code.name] += 1
        await context.abort(code, str(error))

    def _trigger(self, scaled: Any, context: Any) -> Trigger:
        self._callers.check(scaled.namespace, _names_shown(context))
        trigger = parse_trigger(scaled.namespace, dict(scaled.scalerMetadata), self._store.longest_window)
        if not trigger.whom.namespace:
            self._callers.check_cluster()
        return trigger

    def _is_active(self, scaled: Any, context: Any) -> Any:
        trigger = self._trigger(scaled, context)
        return pb.IsActiveResponse(result=is_active(self._store.scene(), trigger.whom, trigger.over.idle_for))

    def _metric_spec(self, scaled: Any, context: Any) -> Any:
        """Needs no figures: KEDA makes its HPA of it, and has to be able to while podgpu has none."""
        trigger = self._trigger(scaled, context)
        spec = pb.MetricSpec(
            metricName=trigger.metric.name, targetSize=_whole(trigger.target), targetSizeFloat=trigger.target
        )
        return pb.GetMetricSpecResponse(metricSpecs=[spec])

    def _metrics(self, request: Any, context: Any) -> Any:
        trigger = self._trigger(request.scaledObjectRef, context)
        name = trigger.metric.name
        if _OLD_PREFIX.sub("", request.metricName) not in ("", name):
            raise bad_request(
                f"the metric {quoted(request.metricName)} is asked for and the trigger's is {name}: "
                "the ScaledObject has changed, KEDA will ask again"
            )
        value = figure_of(self._store.scene(), trigger.whom, trigger.metric, trigger.over).value
        # KEDA before 2.17 reads the whole number alone, and later ones the other only where it is above 0.
        return pb.GetMetricsResponse(
            metricValues=[pb.MetricValue(metricName=name, metricValue=_whole(value), metricValueFloat=value)]
        )

    async def _stream(self, scaled: Any, context: Any) -> AsyncIterator[Any]:
        """Says how it is, and again when that changes. What cannot be told ends it: KEDA comes back."""
        if self._streams >= _MOST_STREAMS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{_MOST_STREAMS} streams are open already")
        self._streams += 1
        told: bool | None = None
        try:
            trigger = self._trigger(scaled, context)
            while True:
                active = is_active(self._store.scene(), trigger.whom, trigger.over.idle_for)
                if active is not told:
                    told = active
                    self.calls["StreamIsActive", "OK"] += 1
                    yield pb.IsActiveResponse(result=active)
                await self._sleep(self._store.settings.interval)
        except Refusal as error:
            await self._refuse("StreamIsActive", error, context)
        finally:
            self._streams -= 1


def _whole(value: float) -> int:
    """What is not 0 is never told as 0."""
    return max(1, round(value)) if value > 0 else 0


def _names_shown(context: Any) -> frozenset[str]:
    """Common name and alternative names of the caller's certificate, which gRPC has verified."""
    shown = context.auth_context()
    names = (*shown.get("x509_common_name", ()), *shown.get("x509_subject_alternative_name", ()))
    return frozenset(name.decode("utf-8", "replace") for name in names)


# The server


async def start_scaler(
    scaler: ExternalScaler,
    address: Address,
    credentials: Any | None,
    option: str,
    connection_seconds: float = _CONNECTION_SECONDS,
) -> tuple[Any, Address]:
    """`credentials`: None for a plain listener. Raises StartError that names the address."""
    options = (*_OPTIONS, ("grpc.max_connection_age_ms", round(1000 * connection_seconds)))
    server = grpc.aio.server(options=options, maximum_concurrent_rpcs=2 * _MOST_STREAMS)
    server.add_generic_rpc_handlers((scaler,))
    where = f"{f'[{address.host}]' if ':' in address.host else address.host or '[::]'}:{address.port}"
    try:
        port = server.add_insecure_port(where) if credentials is None else server.add_secure_port(where, credentials)
    except RuntimeError as error:
        raise StartError(
            f"cannot listen on {where}: it is in use, or no address of this machine; see {option}"
        ) from error
    await server.start()
    return server, Address(address.host, port, "grpc" if credentials is None else "grpcs")


async def stop_scaler(server: Any) -> None:
    await server.stop(_GRACE_SECONDS)
