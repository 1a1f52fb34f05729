"""What a web config file may say, and what is said to somebody who writes one wrongly."""

from __future__ import annotations

import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from podgpu.errors import UsageError
from podgpu.web.web_config import CIPHERS, TLS13_CIPHERS, ClientAuth, WebConfig, parse_web_config
from tests.cli.test_option_table import QUICK, execute

FILE = "/etc/podgpu/web.yml"
HASH = "$2y$10$X0h1gDsPszWURQaxFh.zoubFi6DXncSjhoQNJgRrnGs7EsimhC7zG"
PAIR = {"cert_file": "tls.crt", "key_file": "tls.key"}


def parse(text: str) -> WebConfig:
    return parse_web_config(text.encode(), FILE)


def config(**sections: Any) -> WebConfig:
    return parse(yaml.safe_dump(sections))


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "---\n", "null", "{}", "tls_server_config:\nbasic_auth_users: {}\n"]
)
def test_nothing_asked_for(text: str) -> None:
    assert parse(text) == WebConfig(tls=None, headers={}, users={})


def test_everything_asked_for() -> None:
    whole = parse(f"""
tls_server_config:
  cert_file: tls.crt
  key_file: /keys/tls.key
  client_ca: |
    -----BEGIN CERTIFICATE-----
  client_auth_type: RequireAndVerifyClientCert
  client_allowed_sans: [prometheus.test, 10.0.0.7]
  min_version: TLS13
  max_version: TLS13
  cipher_suites: [TLS_AES_128_GCM_SHA256, TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256]
  prefer_server_cipher_suites: yes
  curve_preferences: [X25519, CurveP256]
http_server_config:
  http2: false
  headers: {{X-Frame-Options: deny, Strict-Transport-Security: max-age=31536000}}
basic_auth_users: {{alice: {HASH}, bob: {HASH}}}
rate_limit: {{interval: 1m30s, burst: 20}}
""")
    assert whole.tls is not None
    assert whole.tls.certificate.file == "/etc/podgpu/tls.crt"
    assert whole.tls.key.file == "/keys/tls.key"
    assert whole.tls.client_ca is not None
    assert whole.tls.client_ca.text.startswith("-----BEGIN")
    assert whole.tls.client_auth is ClientAuth.REQUIRE_AND_VERIFY
    assert whole.tls.allowed_sans == {"prometheus.test", "10.0.0.7"}
    assert whole.tls.min_version == whole.tls.max_version == ssl.TLSVersion.TLSv1_3
    assert whole.tls.ciphers == ("ECDHE-RSA-AES128-GCM-SHA256",)
    assert whole.tls.curves == ("X25519", "prime256v1")
    assert whole.headers == {"X-Frame-Options": "deny", "Strict-Transport-Security": "max-age=31536000"}
    assert set(whole.users) == {"alice", "bob"}
    assert (whole.rate_interval, whole.rate_burst) == (90.0, 20)


def test_what_holds_unless_told_otherwise() -> None:
    tls = config(tls_server_config=PAIR).tls
    assert tls is not None
    assert (tls.client_auth, tls.client_ca, tls.ciphers) == (ClientAuth.NONE, None, ())
    assert (tls.min_version, tls.max_version) == (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3)


def test_a_file_goes_before_a_text() -> None:
    tls = config(tls_server_config=PAIR | {"cert": "inline", "key": "inline"}).tls
    assert tls is not None
    assert (tls.certificate.file, tls.certificate.text) == ("/etc/podgpu/tls.crt", "")


def test_secrets_are_not_shown() -> None:
    whole = config(tls_server_config={"cert": "CERT", "key": "SECRET"}, basic_auth_users={"alice": HASH})
    assert "SECRET" not in repr(whole)
    assert HASH not in repr(whole)


@pytest.mark.parametrize("word", ["VerifyClientCertIfGiven", "RequireAndVerifyClientCert"])
def test_client_policies(word: str) -> None:
    tls = config(tls_server_config=PAIR | {"client_auth_type": word, "client_ca_file": "ca.crt"}).tls
    assert tls is not None
    assert tls.client_auth is ClientAuth(word)


def test_versions_alone_turn_nothing_on() -> None:
    whole = config(tls_server_config={"min_version": "TLS13"})
    assert whole.tls is None
    assert whole.has_unused_tls_keys


def test_only_new_ciphers_leave_only_the_new_version() -> None:
    tls = config(tls_server_config=PAIR | {"cipher_suites": list(TLS13_CIPHERS)}).tls
    assert tls is not None
    assert tls.min_version == ssl.TLSVersion.TLSv1_3


def test_every_cipher_is_one_of_openssls() -> None:
    for name in CIPHERS.values():
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).set_ciphers(name)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1s", 1.0), ("100ms", 0.1), ("1h2m3.5s", 3723.5), (".5s", 0.5), ("10us", 1e-5), ("5ns", 5e-9)],
)
def test_durations(text: str, seconds: float) -> None:
    assert config(rate_limit={"interval": text, "burst": 1}).rate_interval == pytest.approx(seconds)


@pytest.mark.parametrize("interval", ["0", 0, "0s", None])
def test_no_interval_no_limit(interval: object) -> None:
    assert config(rate_limit={"interval": interval, "burst": 3}).rate_interval == 0


TLS = "tls_server_config"
HTTP = "http_server_config"


@pytest.mark.parametrize(
    ("sections", "names"),
    [
        ({"tls_config": {}}, ["tls_config", "unknown field"]),
        ({TLS: {"cert_flie": "x"}}, [TLS, "cert_flie", "unknown field"]),
        ({TLS: []}, [TLS, "Expected `object"]),
        ({TLS: {"cert_file": "tls.crt"}}, [TLS, "key_file", "missing"]),
        ({TLS: {"client_auth_type": "NoClientCert"}}, [TLS, "cert_file", "missing"]),
        ({TLS: {"cert_file": ["x"], "key_file": "y"}}, [f"{TLS}.cert_file", "Expected `str"]),
        ({TLS: PAIR | {"client_ca_file": "ca.crt"}}, [f"{TLS}.client_ca", "client_auth_type"]),
        ({TLS: PAIR | {"client_allowed_sans": ["x"]}}, [f"{TLS}.client_allowed_sans", "client_auth_type"]),
        ({TLS: PAIR | {"client_allowed_sans": "x"}}, [f"{TLS}.client_allowed_sans", "Expected `array"]),
        ({TLS: PAIR | {"client_auth_type": "require"}}, [f"{TLS}.client_auth_type", "'require'"]),
        ({TLS: {"min_version": "TLS14"}}, [f"{TLS}.min_version", "'TLS14'", "TLS13"]),
        ({TLS: PAIR | {"min_version": "TLS13", "max_version": "TLS12"}}, [f"{TLS}.max_version", "min_version"]),
        ({TLS: PAIR | {"cipher_suites": ["TLS_RSA_WITH_RC4_128_SHA"]}}, [f"{TLS}.cipher_suites", "RC4"]),
        ({TLS: {"cipher_suites": [TLS13_CIPHERS[0]], "max_version": "TLS12"}}, ["cipher_suites"]),
        ({TLS: {"curve_preferences": ["P256"]}}, [f"{TLS}.curve_preferences", "'P256'", "CurveP256"]),
        ({HTTP: {"http2": 1}}, [f"{HTTP}.http2", "Expected `bool"]),
        ({HTTP: {"headers": {"Server": "x"}}}, [f"{HTTP}.headers.Server", "X-Frame-Options"]),
        ({HTTP: {"headers": {"X-Frame-Options": "allow"}}}, ["X-Frame-Options", "deny or sameorigin"]),
        ({HTTP: {"headers": {"X-XSS-Protection": "1\r\nA: b"}}}, ["X-XSS-Protection", "character"]),
        ({"basic_auth_users": {"alice": "secret"}}, ["basic_auth_users", "alice", "bcrypt"]),
        ({"basic_auth_users": {"alice": None}}, ["basic_auth_users"]),
        ({"basic_auth_users": {"alice": HASH.replace("$10$", "$03$")}}, ["basic_auth_users", "alice", "bcrypt"]),
        ({"basic_auth_users": ["alice"]}, ["basic_auth_users", "Expected `object"]),
        ({"rate_limit": {"interval": 5}}, ["rate_limit.interval", "1s"]),
        ({"rate_limit": {"interval": "1 s"}}, ["rate_limit.interval", "1s"]),
        ({"rate_limit": {"burst": -1}}, ["rate_limit.burst"]),
        ({"rate_limit": {"burst": "5"}}, ["rate_limit.burst"]),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(sections: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        config(**sections)
    message = str(caught.value)
    assert message.startswith(f"{FILE}: ")
    assert "\n" not in message
    for name in names:
        assert name in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rate_limit: {}\nrate_limit: {}\n", "the key 'rate_limit' is there twice"),
        ("basic_auth_users:\n  bob: x\n  bob: y\n", "the key 'bob' is there twice"),
        ("- a\n", "Expected `object`"),
        ("a: [\n", "line 2: not valid YAML"),
        ("a: 1\n---\nb: 2\n", "not valid YAML"),
        ("tls_server_config: !!python/object:os.system {}\n", "not valid YAML"),
    ],
)
def test_yaml_that_is_not_taken(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert words in str(caught.value)


def test_a_plain_password_is_not_repeated() -> None:
    with pytest.raises(UsageError) as caught:
        config(basic_auth_users={"alice": "correct horse"})
    assert "correct" not in str(caught.value)


# --- anything at all

_words = st.sampled_from(
    [
        *("tls_server_config", "http_server_config", "basic_auth_users", "rate_limit", "cert_file", "cert", "key"),
        *("client_ca", "client_auth_type", "NoClientCert", "RequireClientCert", "client_allowed_sans", "cipher_suites"),
        *("min_version", "TLS12", "curve_preferences", "X25519", "headers", "http2", "X-Frame-Options", "deny"),
        *("interval", "1s", "burst"),
    ]
)
_scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.dates() | st.binary() | st.text() | _words
_anything = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_words | st.text(), inner, max_size=4)
)
_sections = st.dictionaries(_words, st.dictionaries(_words | st.text(), _anything, max_size=5), max_size=4)


def is_refused_or_understood(content: bytes) -> None:
    refusal = f"{FILE}: all of it understood"
    try:
        parse_web_config(content, FILE)
    except UsageError as error:
        refusal = str(error)
    assert refusal.startswith(FILE)
    assert len(refusal.splitlines()) == 1


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(_sections | _anything)
def test_any_yaml_is_refused_or_understood(document: object) -> None:
    is_refused_or_understood(yaml.safe_dump(document, allow_unicode=True).encode("utf-8", "surrogatepass"))


@given(st.binary(max_size=300) | st.text(max_size=300).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_refused_or_understood(content: bytes) -> None:
    is_refused_or_understood(content)


@given(st.text(alphabet=":-{}[]&*!|>'\"%@`,?#\\ \n\tab01~<=", max_size=60))
def test_any_punctuation_is_refused_or_understood(text: str) -> None:
    is_refused_or_understood(text.encode())


# --- the command


@pytest.mark.parametrize("content", ["tls_server_config: {cert_file: tls.crt}\n", "users: {}\n", None])
def test_a_bad_file_ends_the_command_with_one_line(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "web.yml"
    if content is not None:
        path.write_text(content)
    ran = execute([*QUICK, "--web-config-file", str(path)])
    assert (ran.code, ran.out) == (2, "")
    assert str(path) in ran.complaint
    by_variable = execute(QUICK, DCGM_EXPORTER_WEB_CONFIG_FILE=str(path))
    assert by_variable.code == 2
    assert "DCGM_EXPORTER_WEB_CONFIG_FILE" in by_variable.complaint


def test_a_probe_address_that_is_none_is_named() -> None:
    ran = execute([*QUICK, "--probe-address", "9401"])
    assert ran.code == 2
    assert "--probe-address '9401'" in ran.complaint


def test_without_the_option_nothing_is_loaded_for_it() -> None:
    program = (
        "import sys; from podgpu.cli.main import run;"
        "code = run(['exporter', '--once', '--telemetry', 'simulated:1xT4', '-c', '100']);"
        "print(code, [m for m in ('yaml', 'bcrypt', 'podgpu.web.protection') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "0 []"
