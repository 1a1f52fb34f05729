"""Tests the parser of the web config file and its error messages."""

from __future__ import annotations

import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from podgpu.errors import UsageError
from podgpu.web.protection import TLS13_CIPHERS, HttpConfig, TlsConfig, WebConfig, parse_web_config
from tests.cli.test_option_table import QUICK, execute

FILE = "/etc/podgpu/web.yml"
HASH = "$2y$10$X0h1gDsPszWURQaxFh.zoubFi6DXncSjhoQNJgRrnGs7EsimhC7zG"
PAIR = {"cert_file": "tls.crt", "key_file": "tls.key"}


def parse(text: str) -> WebConfig:
    return parse_web_config(text.encode(), FILE)


def config(**sections: Any) -> WebConfig:
    return parse(yaml.safe_dump(sections))


def test_all_keys() -> None:
    whole = parse(f"""
tls_server_config:
  cert_file: tls.crt
  key_file: /keys/tls.key
  client_ca_file: ca.crt
  client_auth_type: RequireAndVerifyClientCert
  client_allowed_sans: [prometheus.test, 10.0.0.7]
  min_version: TLS13
  max_version: TLS13
  cipher_suites: [TLS_AES_128_GCM_SHA256, TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256]
  prefer_server_cipher_suites: true
  curve_preferences: [X25519, CurveP256]
http_server_config:
  http2: false
  headers: {{X-Frame-Options: deny, Strict-Transport-Security: max-age=31536000}}
basic_auth_users: {{alice: {HASH}, 0123: {HASH}, on: {HASH}}}
rate_limit: {{interval: 1m30s, burst: 20}}
""")
    assert whole.tls is not None
    assert config(tls_server_config={"min_version": "TLS13"}).tls is None, (
        "HTTP, like exporter-toolkit"
    )
    assert whole.tls.verify_mode is ssl.CERT_REQUIRED
    assert whole.tls.client_allowed_sans == (
        "prometheus.test",
        "10.0.0.7",
    )
    assert whole.tls.versions == (ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_3)
    assert whole.tls.ciphers == ["ECDHE-RSA-AES128-GCM-SHA256"]
    assert whole.headers == {
        "X-Frame-Options": "deny",
        "Strict-Transport-Security": "max-age=31536000",
    }
    assert set(whole.users) == {"alice", "0123", "on"}
    assert whole.rate_limit is not None
    assert (whole.rate_limit.seconds, whole.rate_limit.burst) == (90.0, 20)
    empty = parse_web_config(b"rate_limit: {}", "web.yaml")
    assert empty.rate_limit is not None
    assert empty.rate_limit.seconds == 0.0


def test_certificates_are_files_beside_the_config_or_text(tmp_path: Path) -> None:
    (tmp_path / "tls.crt").write_text("certificate")
    mixed = TlsConfig(
        cert_file="tls.crt",
        cert="unused",
        key="key",
        client_ca="ca",
        client_auth_type="VerifyClientCertIfGiven",
    )
    assert mixed.read_pems(str(tmp_path / "web.yml")) == (b"certificate", b"key", b"ca")


TLS = "tls_server_config"
HTTP = "http_server_config"


@pytest.mark.parametrize(
    ("sections", "names"),
    [
        ({"tls_config": {}}, ["tls_config", "unknown field"]),
        ({TLS: {"cert_flie": "x"}}, [TLS, "cert_flie", "unknown field"]),
        ({TLS: {"cert_file": "tls.crt"}}, [TLS, "key_file"]),
        ({TLS: PAIR | {"client_ca_file": "ca.crt"}}, [TLS, "client_ca", "client_auth_type"]),
        (
            {TLS: PAIR | {"client_allowed_sans": ["x"]}},
            [TLS, "client_allowed_sans", "client_auth_type"],
        ),
        ({TLS: PAIR | {"client_auth_type": "require"}}, [TLS, "client_auth_type", "'require'"]),
        (
            {TLS: PAIR | {"min_version": "TLS13", "max_version": "TLS12"}},
            [TLS, "max_version", "min_version"],
        ),
        ({TLS: {"curve_preferences": ["P256"]}}, [TLS, "curve_preferences", "'P256'", "CurveP256"]),
        (
            {TLS: PAIR | {"cipher_suites": ["TLS_RSA_WITH_RC4_128_SHA"]}},
            [TLS, "cipher_suites", "RC4"],
        ),
        (
            {TLS: PAIR | {"cipher_suites": [TLS13_CIPHERS[0]], "max_version": "TLS12"}},
            ["cipher_suites"],
        ),
        ({HTTP: {"headers": {"Server": "x"}}}, [HTTP, "headers", "Server", "X-Frame-Options"]),
        (
            {HTTP: {"headers": {"X-Frame-Options": "allow"}}},
            ["X-Frame-Options", "deny or sameorigin"],
        ),
        ({HTTP: {"headers": {"X-XSS-Protection": "1\r\nA: b"}}}, ["X-XSS-Protection", "character"]),
        ({"basic_auth_users": {"alice": "secret"}}, ["basic_auth_users", "alice", "bcrypt"]),
        (
            {"basic_auth_users": {"alice": HASH.replace("$10$", "$03$")}},
            ["basic_auth_users", "alice", "bcrypt"],
        ),
        ({"rate_limit": {"interval": 5}}, ["rate_limit", "interval", "1s"]),
        ({"rate_limit": {"burst": -1}}, ["rate_limit.burst"]),
    ],
    ids=str,
)
def test_messages_name_the_mistake(sections: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        config(**sections)
    message = str(caught.value)
    assert message.startswith(f"{FILE}: ")
    assert "\n" not in message
    for name in names:
        assert name in message


_keys = st.sampled_from(
    [field for kind in (WebConfig, TlsConfig, HttpConfig) for field in kind.__struct_fields__]
)
_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.dates() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(_keys | st.text(), inner, max_size=4)
    ),
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(_keys, _values, max_size=4) | _values)
def test_any_document_is_parsed_or_refused(document: object) -> None:
    with suppress(UsageError):
        parse(yaml.safe_dump(document, allow_unicode=True))


def test_command_ends_with_one_line(tmp_path: Path) -> None:
    path = tmp_path / "web.yml"
    path.write_text("tls_server_config: {cert_file: tls.crt}\n")
    ran = execute([*QUICK, "--web-config-file", str(path)])
    assert (ran.code, ran.out) == (2, "")
    assert str(path) in ran.complaint
    by_variable = execute(QUICK, DCGM_EXPORTER_WEB_CONFIG_FILE=str(path))
    assert (by_variable.code, str(path) in by_variable.complaint) == (2, True)
