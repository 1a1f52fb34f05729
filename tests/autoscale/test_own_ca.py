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

from podgpu.autoscale.own_ca import (
    LOOK_SECONDS,
    MOST_IN_BUNDLE,
    OVERLAP_SECONDS,
    BundleKeeper,
    OwnCa,
    Served,
    maker_of,
    merged,
)
from podgpu.autoscale.x509 import Issued, certificates_in, issue, parse_validity
from podgpu.clock import Clock
from podgpu.tls import load_pair
from tests.autoscale.api_double import ApiDouble, api_service

SERVED = Served("podgpu", "podgpu-autoscale")
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
        for name, text in (("ca.crt", issued.authority), ("tls.crt", issued.certificate), ("tls.key", issued.key)):
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
    shake_hands(issued, issued.authority)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(issued, other.authority)


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
    (certificate,) = certificates_in(made().authority)
    assert parse_validity(certificate) == (NOW, NOW + 10 * DAY)
    (late,) = certificates_in(made(ends=NOW + 365 * 30 * DAY).authority)
    assert parse_validity(late) == (NOW, NOW + 365 * 30 * DAY)
    assert parse_validity(b"") is None


# The bundle


def test_a_bundle_keeps_other_replicas_and_drops_what_has_expired() -> None:
    own, replica, expired = made(1), made(2), made(3, NOW - 20 * DAY, NOW - 10 * DAY)
    bundle = merged(replica.authority + expired.authority + "garbage", [own.authority], OWN, NOW)
    assert certificates_in(bundle) == certificates_in(own.authority + replica.authority)
    assert merged(bundle, [own.authority], OWN, NOW) == bundle


def test_a_bundle_does_not_grow_without_end() -> None:
    others = "".join(made(seed, NOW + seed).authority for seed in range(MOST_IN_BUNDLE + 10))
    own = made(99, replica="own")
    kept = certificates_in(merged(others, [own.authority], OWN, NOW))
    assert len(kept) == MOST_IN_BUNDLE
    assert kept[0] == certificates_in(own.authority)[0]
    assert kept[1] == certificates_in(made(MOST_IN_BUNDLE + 9, NOW + MOST_IN_BUNDLE + 9).authority)[0]


@pytest.mark.fault(
    "a replica of podgpu autoscale crashes again and again",
    "its former authorities leave the APIServices' bundles; the healthy replica's stays",
)
def test_a_replica_that_crashes_again_and_again_pushes_nobody_out() -> None:
    healthy = made(500, NOW - DAY, replica="healthy")
    bundle = healthy.authority
    for seed in range(MOST_IN_BUNDLE + 10):
        crashed = made(seed, NOW + seed, replica="own")
        bundle = merged(bundle, [crashed.authority], OWN, NOW)
    found = certificates_in(bundle)
    assert certificates_in(healthy.authority)[0] in found
    assert found[0] == certificates_in(crashed.authority)[0]
    assert len(found) == 3, "its own, the one before, and the other replica's"


class Hands:
    """Time, moved by hand."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.clock = Clock(monotonic=lambda: self.seconds, wall=lambda: NOW + self.seconds)
        self.ca = OwnCa(SERVED.names, "first", self.clock, random_below=random.Random(5).randrange)


def bundle_of(api: ApiDouble, name: str = NAMES[0]) -> list[bytes]:
    return certificates_in(base64.b64decode(api.services[name]["spec"].get("caBundle", "")).decode())


def with_keeper(api: ApiDouble, hands: Hands, *moments: float) -> list[Issued]:
    """What is shown after a look at each of these moments."""

    async def run() -> list[Issued]:
        shown = []
        async with api.running() as client:
            keeper = BundleKeeper(client, hands.ca, NAMES, SERVED, hands.clock)
            for moment in moments:
                hands.seconds = moment
                await keeper.turn()
                shown.append(hands.ca.shown)
            assert keeper.are_known
        return shown

    return asyncio.run(run())


def test_the_apiservices_are_told_and_nothing_else_of_them_is_changed() -> None:
    api, hands = ApiDouble(services={name: api_service() for name in NAMES}), Hands()
    with_keeper(api, hands, 0.0, 30.0)
    assert [name for name, _ in api.patches] == list(NAMES)
    assert {*api.patches[0][1]["spec"]} == {"caBundle", "insecureSkipTLSVerify"}
    assert bundle_of(api) == certificates_in(hands.ca.shown.authority)


def test_an_apiservice_of_somebody_else_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    services = {NAMES[0]: api_service(), NAMES[1]: api_service("monitoring", "prometheus-adapter")}
    api = ApiDouble(services=services)
    with_keeper(api, Hands(), 0.0, 30.0)
    assert [name for name, _ in api.patches] == [NAMES[0]]
    assert caplog.text.count("belongs to monitoring/prometheus-adapter") == 1


def test_two_replicas_are_both_in_the_bundle() -> None:
    api = ApiDouble(services={name: api_service() for name in NAMES})
    first, second = Hands(), Hands()
    second.ca = OwnCa(SERVED.names, "second", second.clock, random_below=random.Random(6).randrange)
    with_keeper(api, first, 0.0)
    with_keeper(api, second, 0.0)
    with_keeper(api, first, 30.0)
    assert set(bundle_of(api)) == {*certificates_in(first.ca.shown.authority + second.ca.shown.authority)}


def test_the_next_authority_is_known_before_it_is_shown_and_the_last_one_stays_until_it_expires() -> None:
    api, hands = ApiDouble(services={name: api_service() for name in NAMES}), Hands()
    renewed = 7 * DAY
    moments = (0.0, renewed, renewed + OVERLAP_SECONDS - 1, renewed + OVERLAP_SECONDS, renewed + 2 * OVERLAP_SECONDS)
    first, *shown, last, _ = with_keeper(api, hands, *moments)
    assert shown == [first, first]
    assert last.authority != first.authority
    assert set(bundle_of(api)) == {*certificates_in(first.authority + last.authority)}
    with_keeper(api, hands, first.ends - NOW + 1)
    assert certificates_in(first.authority)[0] not in bundle_of(api)


def test_while_the_bundle_cannot_be_changed_the_last_certificate_is_shown() -> None:
    api, hands = ApiDouble(services={name: api_service() for name in NAMES}), Hands()
    (first,) = with_keeper(api, hands, 0.0)
    api.is_ill = True

    async def run() -> None:
        async with api.running() as client:
            keeper = BundleKeeper(client, hands.ca, NAMES, SERVED, hands.clock)
            for moment in (7 * DAY, 7 * DAY + 2 * OVERLAP_SECONDS):
                hands.seconds = moment
                await keeper.turn()

    asyncio.run(run())
    assert hands.ca.shown == first


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

            keeper = BundleKeeper(client, hands.ca, NAMES, SERVED, hands.clock, sleep)
            with pytest.raises(Enough):
                await keeper.run()

    asyncio.run(run())
    assert known == [True, True, True]
    assert slept == [LOOK_SECONDS / 15, LOOK_SECONDS / 15, LOOK_SECONDS]
    assert [name for name, _ in api.patches] == list(NAMES)
