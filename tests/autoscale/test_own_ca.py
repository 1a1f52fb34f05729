"""podgpu's own authority: what OpenSSL says of it, what the APIServices are told, and how it is renewed."""

from __future__ import annotations

import asyncio
import base64
import random
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from podgpu.autoscale.certificates import (
    CHECK_SECONDS,
    MAX_CERTIFICATES,
    OVERLAP_SECONDS,
    CaBundleUpdater,
    CertificateIssuer,
    Issued,
    ServiceName,
    issue,
    maker_of,
    merge_bundle,
    parse_bundle_der,
    parse_validity,
)
from podgpu.clock import Clock
from podgpu.tls import load_pair
from tests.autoscale.api_double import ApiDouble, api_service

SERVED = ServiceName("podgpu", "podgpu-autoscale")
OWN = maker_of("own")
NAMES = ("v1beta2.custom.metrics.k8s.io", "v1beta1.custom.metrics.k8s.io")
DAY = 86_400.0
NOW = 1_790_000_000.0


def made(seed: int = 0, begins: float = NOW, ends: float = NOW + 10 * DAY, replica: str = "") -> Issued:
    """Of a replica of its own, unless one is named."""
    return issue(SERVED.names, begins, ends, random.Random(seed).randrange, maker_of(replica or f"replica-{seed}"))


def test_openssl_takes_the_chain_and_the_key(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    for seed in range(5):
        issued = made(seed)
        for name, text in (("ca.crt", issued.ca), ("tls.crt", issued.certificate), ("tls.key", issued.key)):
            (tmp_path / name).write_text(text)
        host = ("-verify_hostname", "podgpu-autoscale.podgpu.svc", "-attime", str(int(NOW) + 60))
        for words in (
            ("verify", "-x509_strict", "-purpose", "sslserver", *host, "-CAfile", "ca.crt", "tls.crt"),
            ("ec", "-in", "tls.key", "-check", "-noout"),
        ):
            done = subprocess.run(["openssl", *words], cwd=tmp_path, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr


def test_what_is_made_shakes_hands_and_others_do_not() -> None:
    """In memory, with Python's own TLS on both sides."""
    issued, other = (issue(SERVED.names, 0.0, 4e9, random.Random(seed).randrange) for seed in (1, 2))
    shake_hands(issued, issued.ca)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(issued, other.ca)


def shake_hands(issued: Issued, authority: str) -> None:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load_pair(server, issued.certificate.encode(), issued.key.encode(), "own")
    client = ssl.create_default_context(cadata=authority)
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server, server_hostname=SERVED.names[0]),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(10):
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert sides[0].getpeercert()


def test_from_when_until_when_is_read_back() -> None:
    (certificate,) = parse_bundle_der(made().ca)
    assert parse_validity(certificate) == (NOW, NOW + 10 * DAY)
    (late,) = parse_bundle_der(made(ends=NOW + 365 * 30 * DAY).ca)
    assert parse_validity(late) == (NOW, NOW + 365 * 30 * DAY)
    assert parse_validity(b"") is None


# The bundle


def test_a_bundle_keeps_other_replicas_and_drops_what_has_expired() -> None:
    own, replica, expired = made(1), made(2), made(3, NOW - 20 * DAY, NOW - 10 * DAY)
    bundle = merge_bundle(replica.ca + expired.ca + "garbage", [own.ca], OWN, NOW)
    assert parse_bundle_der(bundle) == parse_bundle_der(own.ca + replica.ca)
    assert merge_bundle(bundle, [own.ca], OWN, NOW) == bundle


def test_a_bundle_does_not_grow_without_end() -> None:
    others = "".join(made(seed, NOW + seed).ca for seed in range(MAX_CERTIFICATES + 10))
    own = made(99, replica="own")
    kept = parse_bundle_der(merge_bundle(others, [own.ca], OWN, NOW))
    assert len(kept) == MAX_CERTIFICATES
    assert kept[0] == parse_bundle_der(own.ca)[0]
    assert kept[1] == parse_bundle_der(made(MAX_CERTIFICATES + 9, NOW + MAX_CERTIFICATES + 9).ca)[0]


@pytest.mark.fault(
    "a replica of podgpu autoscale crashes again and again",
    "its former authorities leave the APIServices' bundles; the healthy replica's stays",
)
def test_a_replica_that_crashes_again_and_again_pushes_nobody_out() -> None:
    healthy = made(500, NOW - DAY, replica="healthy")
    bundle = healthy.ca
    for seed in range(MAX_CERTIFICATES + 10):
        crashed = made(seed, NOW + seed, replica="own")
        bundle = merge_bundle(bundle, [crashed.ca], OWN, NOW)
    found = parse_bundle_der(bundle)
    assert parse_bundle_der(healthy.ca)[0] in found
    assert found[0] == parse_bundle_der(crashed.ca)[0]
    assert len(found) == 3, "its own, the one before, and the other replica's"


class Hands:
    """Time, moved by hand."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.clock = Clock(monotonic=lambda: self.seconds, wall=lambda: NOW + self.seconds)
        self.ca = CertificateIssuer(SERVED.names, "first", self.clock, random_below=random.Random(5).randrange)


def bundle_of(api: ApiDouble, name: str = NAMES[0]) -> list[bytes]:
    return parse_bundle_der(base64.b64decode(api.services[name]["spec"].get("caBundle", "")).decode())


def with_keeper(api: ApiDouble, hands: Hands, *moments: float) -> list[Issued]:
    """What is shown after a look at each of these moments."""

    async def run() -> list[Issued]:
        shown = []
        async with api.running() as client:
            keeper = CaBundleUpdater(client, hands.ca, NAMES, SERVED, hands.clock)
            for moment in moments:
                hands.seconds = moment
                await keeper.turn()
                shown.append(hands.ca.current)
            assert keeper.are_known
        return shown

    return asyncio.run(run())


def test_the_apiservices_are_told_and_nothing_else_of_them_is_changed() -> None:
    api, hands = ApiDouble(services={name: api_service() for name in NAMES}), Hands()
    with_keeper(api, hands, 0.0, 30.0)
    assert [name for name, _ in api.patches] == list(NAMES)
    assert {*api.patches[0][1]["spec"]} == {"caBundle", "insecureSkipTLSVerify"}
    assert bundle_of(api) == parse_bundle_der(hands.ca.current.ca)


def test_an_apiservice_of_somebody_else_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    services = {NAMES[0]: api_service(), NAMES[1]: api_service("monitoring", "prometheus-adapter")}
    api = ApiDouble(services=services)
    with_keeper(api, Hands(), 0.0, 30.0)
    assert [name for name, _ in api.patches] == [NAMES[0]]
    assert caplog.text.count("belongs to monitoring/prometheus-adapter") == 1


def test_two_replicas_are_both_in_the_bundle() -> None:
    api = ApiDouble(services={name: api_service() for name in NAMES})
    first, second = Hands(), Hands()
    second.ca = CertificateIssuer(SERVED.names, "second", second.clock, random_below=random.Random(6).randrange)
    with_keeper(api, first, 0.0)
    with_keeper(api, second, 0.0)
    with_keeper(api, first, 30.0)
    assert set(bundle_of(api)) == {*parse_bundle_der(first.ca.current.ca + second.ca.current.ca)}


def test_the_next_authority_is_known_before_it_is_shown_and_the_last_one_stays_until_it_expires() -> None:
    api, hands = ApiDouble(services={name: api_service() for name in NAMES}), Hands()
    renewed = 7 * DAY
    moments = (0.0, renewed, renewed + OVERLAP_SECONDS - 1, renewed + OVERLAP_SECONDS, renewed + 2 * OVERLAP_SECONDS)
    first, *shown, last, _ = with_keeper(api, hands, *moments)
    assert shown == [first, first]
    assert last.ca != first.ca
    assert set(bundle_of(api)) == {*parse_bundle_der(first.ca + last.ca)}
    with_keeper(api, hands, first.ends - NOW + 1)
    assert parse_bundle_der(first.ca)[0] not in bundle_of(api)


def test_while_the_bundle_cannot_be_changed_the_last_certificate_is_shown() -> None:
    api, hands = ApiDouble(services={name: api_service() for name in NAMES}), Hands()
    (first,) = with_keeper(api, hands, 0.0)
    api.is_ill = True

    async def run() -> None:
        async with api.running() as client:
            keeper = CaBundleUpdater(client, hands.ca, NAMES, SERVED, hands.clock)
            for moment in (7 * DAY, 7 * DAY + 2 * OVERLAP_SECONDS):
                hands.seconds = moment
                await keeper.turn()

    asyncio.run(run())
    assert hands.ca.current == first


@pytest.mark.fault(
    "somebody deletes podgpu's APIServices",
    "a replica that starts then is ready, and puts its CA in when they are back",
)
def test_an_apiservice_that_is_not_there_is_waited_for_and_keeps_nobody_from_being_ready() -> None:
    api, hands, slept, known = ApiDouble(services={NAMES[0]: api_service()}), Hands(), [], []

    class Enough(Exception):
        pass

    async def run() -> None:
        async with api.running() as client:

            async def sleep(seconds: float) -> None:
                slept.append(seconds)
                known.append(keeper.are_known)
                if len(slept) == 2:
                    api.services[NAMES[1]] = api_service()
                elif len(slept) == 3:
                    raise Enough

            keeper = CaBundleUpdater(client, hands.ca, NAMES, SERVED, hands.clock, sleep)
            with pytest.raises(Enough):
                await keeper.run()

    asyncio.run(run())
    assert known == [True, True, True]
    assert slept == [CHECK_SECONDS / 15, CHECK_SECONDS / 15, CHECK_SECONDS]
    assert [name for name, _ in api.patches] == list(NAMES)
