"""Implements KEDA's external scaler protocol over gRPC.

Without certificates the listener accepts only local connections. With certificates,
`--keda-client-name` limits the accepted client names.
"""

from __future__ import annotations

import ssl
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from podgpu.errors import StartError
from podgpu.http_client import url_host
from podgpu.scale import externalscaler_pb2 as pb
from podgpu.scale.answers import compute_value, is_active
from podgpu.scale.requests import MetricRequest, Refusal, forbidden, parse_trigger
from podgpu.scale.samples import SampleStore
from podgpu.tls import LastValid, Pem, load_authorities, load_pair
from podgpu.web.app import Address

KEDA_OPTION = "--keda-address"
_SERVICE = "externalscaler.ExternalScaler"
_STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    503: grpc.StatusCode.UNAVAILABLE,
}
_MAX_CALLS = 4000
_OPTIONS = (
    ("grpc.max_receive_message_length", 64 * 1024),
    ("grpc.so_reuseport", 0),  # so that a second podgpu on the same address fails to start
    # KEDA opens one connection per replica. The limit is higher, because unfinished handshakes
    # count too.
    ("grpc.max_allowed_incoming_connections", 1024),
    ("grpc.server_handshake_timeout_ms", 3_000),  # gRPC's default is two minutes
    # limits memory, because a stream may use 0.5 MB for headers
    ("grpc.max_concurrent_streams", 10),
    ("grpc.max_metadata_size", 4096),  # protects against decompression bombs in headers
    ("grpc.absolute_max_metadata_size", 8192),
    ("grpc.max_connection_idle_ms", 600_000),
    # clients must then connect again with a valid certificate
    ("grpc.max_connection_age_ms", 3_600_000),
    ("grpc.max_connection_age_grace_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)


@dataclass(eq=False)
class ExternalScaler:
    _store: SampleStore
    _address: Address
    _credentials: Any = None  # None: no TLS
    _client_names: frozenset[str] = frozenset()  # if empty, all client names are accepted
    _server: Any = None
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)  # by method and status

    async def start(self) -> Address:
        """Starts the gRPC server and returns its address. Raises StartError if it cannot listen."""
        server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=_MAX_CALLS)
        self._server = server
        reference = pb.ScaledObjectRef
        handlers = {
            "IsActive": self._make_unary("IsActive", self._is_active, reference),
            "GetMetricSpec": self._make_unary("GetMetricSpec", self._get_metric_spec, reference),
            "GetMetrics": self._make_unary("GetMetrics", self._get_metrics, pb.GetMetricsRequest),
        }
        service = grpc.method_handlers_generic_handler(_SERVICE, handlers)
        server.add_generic_rpc_handlers((service,))

        port = self._add_port(server)
        await server.start()
        scheme = "grpc" if self._credentials is None else "grpcs"
        return Address(self._address.host, port, scheme)

    def _add_port(self, server: Any) -> int:
        host = url_host(self._address.host or "::")
        target = f"{host}:{self._address.port}"
        try:
            if self._credentials is None:
                port = server.add_insecure_port(target)
            else:
                port = server.add_secure_port(target, self._credentials)
        except RuntimeError as error:
            raise StartError(
                f"cannot listen on {target}: the port is in use, or the address is not local; "
                f"see {KEDA_OPTION}"
            ) from error
        return int(port)

    async def stop(self) -> None:
        await self._server.stop(grace=1.0)

    def _make_unary(self, method: str, answer: Callable[[Any], Any], request_type: Any) -> Any:
        async def handle(request: Any, context: Any) -> Any:
            try:
                self._check_client(context)
                message = answer(request)
            except Refusal as error:
                code = _STATUS[error.status]
                self.calls[f"keda {method}", code.name] += 1
                await context.abort(code, str(error))
            else:
                self.calls[f"keda {method}", "OK"] += 1
                return message

        return grpc.unary_unary_rpc_method_handler(
            handle, request_type.FromString, lambda message: message.SerializeToString()
        )

    def _check_client(self, context: Any) -> None:
        if not self._client_names:
            return
        identity = context.auth_context()
        names = list(identity.get("x509_common_name", ()))
        names += identity.get("x509_subject_alternative_name", ())
        texts = {name.decode("utf-8", "replace") for name in names}
        if self._client_names.isdisjoint(texts):
            raise forbidden(
                f"the certificate of {', '.join(sorted(texts)) or '(no name)'} "
                "has none of the accepted names: see --keda-client-name"
            )

    def _parse_trigger(self, scaled: Any) -> tuple[MetricRequest, float]:
        return parse_trigger(scaled.namespace, dict(scaled.scalerMetadata), self._store.max_window)

    def _is_active(self, scaled: Any) -> Any:
        request, _ = self._parse_trigger(scaled)
        return pb.IsActiveResponse(result=is_active(self._store.snapshot(), request))

    def _get_metric_spec(self, scaled: Any) -> Any:
        """Returns the metric's name and target.

        Needs no samples, because KEDA may call this before samples exist.
        """
        request, target = self._parse_trigger(scaled)
        spec = pb.MetricSpec(
            metricName=request.metric.name, targetSize=_round_up(target), targetSizeFloat=target
        )
        return pb.GetMetricSpecResponse(metricSpecs=[spec])

    def _get_metrics(self, message: Any) -> Any:
        request, _ = self._parse_trigger(message.scaledObjectRef)
        value = compute_value(self._store.snapshot(), request).value
        # KEDA before 2.17 uses only the integer. Later versions use the float if it is above 0.
        metric = pb.MetricValue(
            metricName=request.metric.name,
            metricValue=_round_up(value),
            metricValueFloat=value,
        )
        return pb.GetMetricsResponse(metricValues=[metric])


def _round_up(value: float) -> int:
    """Rounds to an integer, but never rounds a value above 0 to 0."""
    if value > 0:
        return max(1, round(value))
    return 0


def load_credentials(certificate: Pem, key: Pem, client_ca: Pem) -> Any:
    """Returns gRPC credentials that require a client certificate signed by the CA.

    The files are read again at every handshake. If they become invalid, the last valid content is
    used. Raises UsageError if they are invalid at the start.
    """

    def read() -> tuple[bytes, bytes, bytes]:
        certificate_pem = certificate.read()
        key_pem = key.read()
        ca_pem = client_ca.read()

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        load_pair(context, certificate_pem, key_pem, f"{certificate.name} and {key.name}")
        load_authorities(context, ca_pem, client_ca.name)
        return certificate_pem, key_pem, ca_pem

    valid = LastValid(read, "KEDA's listener keeps its previous certificates")
    used: tuple[bytes, ...] = ()

    def configure() -> Any:
        """Called by gRPC at every handshake, in gRPC's thread.

        Returns None to keep the current configuration.
        """
        nonlocal used
        content = valid.get()
        if content == used:
            return None
        used = content
        certificate_pem, key_pem, ca_pem = content
        return grpc.ssl_server_certificate_configuration([(key_pem, certificate_pem)], ca_pem)

    return grpc.dynamic_ssl_server_credentials(
        configure(), configure, require_client_authentication=True
    )
