"""This module carries out what a web config file asks for: checked at start, and ready for every listener.

Imported only when there is such a file: YAML and bcrypt cost memory that a plain exporter need not spend.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp.typedefs import Middleware

from podgpu.web.aside import Aside, Latest
from podgpu.web.auth import Passwords, TokenBucket, guard
from podgpu.web.connections import MakeContext
from podgpu.web.tls import Contexts
from podgpu.web.web_config import ClientAuth, TlsSettings, WebConfig, WebConfigFile

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Protection:
    tls: MakeContext | None
    """For each connection anew. None: plain HTTP, for as long as the process runs."""
    middleware: Middleware
    close: Callable[[], None]


def protect(path: str, clock: Callable[[], float] = time.monotonic) -> Protection:
    """Raises UsageError where podgpu would not be protected as the file says."""
    file = WebConfigFile(path)
    config = file.read()
    contexts = Contexts(file.current)
    at_start = contexts.make(config.tls) if config.tls is not None else None
    _say_what_may_surprise(config, path)
    bucket = TokenBucket(config.rate_limit, clock) if config.rate_limit else None
    passwords, disk = Passwords(), Aside("web-config")

    def close() -> None:
        passwords.close()
        disk.close()

    current: Latest[WebConfig | None] = Latest(file.current, config, disk)
    return Protection(
        tls=Latest(contexts.now, at_start, disk).now if at_start is not None else None,
        middleware=guard(current.now, bucket, passwords),
        close=close,
    )


def _say_what_may_surprise(config: WebConfig, path: str) -> None:
    if config.tls_keys_without_effect:
        _log.warning("%s: tls_server_config names no certificate: podgpu serves plain HTTP", path)
    if config.users and config.tls is None:
        _log.warning("%s: basic auth without TLS: passwords cross the network readable", path)
    if config.tls is not None:
        _say_what_tls_may_surprise(config.tls)


def _say_what_tls_may_surprise(tls: TlsSettings) -> None:
    if len(tls.curves) > 1:
        _log.warning("%s: curve_preferences: Python can set one curve; of several, OpenSSL chooses", tls.origin)
    if tls.client_auth is not ClientAuth.NONE and tls.client_ca is None:
        _log.warning("%s: no client_ca_file: certificates of every authority this system trusts are taken", tls.origin)
