"""Reads --otlp and OpenTelemetry's standard variables (OTEL_*)."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from urllib.parse import unquote

import click
from click.core import ParameterSource

from podgpu.cli.options import Options, naming_option
from podgpu.errors import UsageError
from podgpu.http_client import Access, HttpClient
from podgpu.metrics.otlp import SERVICE_NAME
from podgpu.web.push import DEFAULT_INTERVAL, PushSettings, Receiver

_PREFIX = "OTEL_EXPORTER_OTLP_"
_PROTOCOL = "http/protobuf"
_GRPC_PORT = ":4317"
_DEFAULT_TIMEOUT = 10.0
_MAX_DIGITS = 9  # of milliseconds: 11 days. Much larger numbers raise OverflowError in a timer.
_MAX_RESPONSE_BYTES = 64 * 1024
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # name of an HTTP header
_UNSUPPORTED = (
    "CLIENT_KEY",
    "CLIENT_CERTIFICATE",
    "INSECURE",
    "METRICS_COMPRESSION",
    "LOGS_COMPRESSION",
)
_COMPRESSIONS = ("", "gzip", "none")
_log = logging.getLogger("podgpu")
Environment = Mapping[str, str]


def read_push_settings(
    ctx: click.Context, options: Options, environment: Environment, *, kubernetes: bool
) -> PushSettings | None:
    """Returns None if nothing is sent. Raises UsageError if the options are invalid."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        metrics = _make_receiver(options, environment, "METRICS")
        logs = _make_receiver(options, environment, "LOGS")
    except _UnknownProtocol as error:
        # The variables may be meant for other programs in the pod, so they must not end this one.
        if ctx.get_parameter_source("otlp") is ParameterSource.COMMANDLINE:
            raise
        _log.warning("%s; nothing is sent by OTLP", error)
        return None
    if metrics is None and logs is None:
        return None

    for name in _UNSUPPORTED:
        if environment.get(_PREFIX + name):
            _log.warning("%s%s has no effect: podgpu does not support it", _PREFIX, name)

    compression = environment.get(f"{_PREFIX}COMPRESSION", "")
    if compression not in _COMPRESSIONS:
        warning = "%sCOMPRESSION=%a has no effect: podgpu knows gzip, which it uses, and none"
        _log.warning(warning, _PREFIX, compression[:40])

    variable = "OTEL_METRIC_EXPORT_INTERVAL"
    text = environment.get(variable, "")
    interval = _parse_milliseconds(variable, text, DEFAULT_INTERVAL, least=1.0)
    return PushSettings(
        metrics=metrics,
        logs=logs,
        interval=interval,
        compress=compression != "none",
        attributes=_read_attributes(environment),
        kubernetes=kubernetes,
    )


class _UnknownProtocol(UsageError):
    pass


def _make_receiver(options: Options, environment: Environment, signal: str) -> Receiver | None:
    """Returns the receiver of METRICS or LOGS, or None if these are not sent."""

    def read(name: str) -> tuple[str, str]:
        """Returns the variable of the signal, or that of all signals, and its value."""
        variable = f"{_PREFIX}{signal}_{name}"
        if not environment.get(variable):
            variable = _PREFIX + name
        return variable, environment.get(variable, "")

    exporters = environment.get(f"OTEL_{signal}_EXPORTER", "otlp").split(",")
    # The variable of a signal is a whole URL, --otlp is the address of a receiver of all signals.
    option = f"{_PREFIX}{signal}_ENDPOINT"
    url = environment.get(option, "")
    path = ""
    if not url:
        option = "--otlp"
        url = options["otlp"]
        path = f"v1/{signal.lower()}"
    if not url or "otlp" not in map(str.strip, exporters):
        return None

    variable, protocol = read("PROTOCOL")
    if protocol not in ("", _PROTOCOL):
        raise _UnknownProtocol(
            f"{variable}={protocol[:40]!a}: podgpu sends only {_PROTOCOL}, which a Collector"
            " receives on port 4318"
        )

    variable, text = read("HEADERS")
    headers = _parse_headers(variable, text)
    variable, ca_file = read("CERTIFICATE")
    access = Access(
        ca_file=ca_file,
        headers=tuple(headers.items()),
        advice=f"see {_PREFIX}HEADERS and {_PREFIX}CERTIFICATE",
    )

    variable, text = read("TIMEOUT")
    timeout = _parse_milliseconds(variable, text, _DEFAULT_TIMEOUT, least=0.1)

    with naming_option(option):
        client = HttpClient(url, access, timeout=timeout, max_bytes=_MAX_RESPONSE_BYTES)
    if client.host.endswith(_GRPC_PORT):
        _log.warning(
            "%s: port 4317 is usually for gRPC, but podgpu sends HTTP: use port 4318", client.shown
        )
    return Receiver(client, path)


def _parse_headers(variable: str, text: str) -> dict[str, str]:
    """Parses `name=value,name=value`, with URL-encoded values. Messages do not contain values."""
    headers = {}
    for name, value in _parse_pairs(variable, text).items():
        if not _TOKEN.fullmatch(name) or not value.isprintable() or not value.isascii():
            raise UsageError(f"{variable}: a name or a value is not valid in an HTTP header")
        headers[name] = value
    return headers


def _read_attributes(environment: Environment) -> dict[str, str]:
    variable = "OTEL_RESOURCE_ATTRIBUTES"
    attributes = _parse_pairs(variable, environment.get(variable, ""))
    service = environment.get("OTEL_SERVICE_NAME", "")
    if service:
        attributes[SERVICE_NAME] = service
    return attributes


def _parse_pairs(variable: str, text: str) -> dict[str, str]:
    pairs = {}
    for item in text.split(","):
        if not item.strip():
            continue
        name, separator, value = item.partition("=")
        if not separator or not name.strip():
            raise UsageError(f"{variable}: write NAME=VALUE,NAME=VALUE with URL-encoded values")
        pairs[unquote(name.strip())] = unquote(value.strip())
    return pairs


def _parse_milliseconds(variable: str, text: str, default: float, *, least: float) -> float:
    """Returns seconds. `default` and `least` are seconds, too."""
    text = text.strip()
    if not text:
        return default
    seconds = 0.0
    if text.isdecimal() and len(text) <= _MAX_DIGITS:
        seconds = int(text) / 1000
    if seconds < least:
        raise UsageError(
            f"{variable}={text[:40]!a} must be a number of milliseconds, at least {least * 1000:g}"
        )
    return seconds
