"""podgpu's own certificate, its CA in the APIServices, and its renewal."""

from __future__ import annotations

import asyncio
import base64
import shutil
import subprocess
from pathlib import Path

import pytest

from podgpu.autoscale.certificates import (
    MAX_CERTIFICATES,
    OVERLAP_SECONDS,
    CaBundleUpdater,
    CertificateIssuer,
    Issued,
    ServiceName,
    issue,
    merge_bundle,
    parse_bundle_der,
)
from podgpu.clock import Clock
from tests.autoscale.api_double import ApiDouble, api_service

SERVED = ServiceName("podgpu", "podgpu-autoscale")
OWN = "own"
NAMES = ("v1beta2.custom.metrics.k8s.io", "v1beta1.custom.metrics.k8s.io")
DAY = 86_400.0
NOW = 1_790_000_000.0


def issued(not_before: float = NOW, not_after: float = NOW + 10 * DAY, ca_name: str = "other") -> Issued:
    return issue(SERVED.host_names, not_before, not_after, ca_name)


def test_openssl_accepts_the_chain_and_the_key(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    own = issued()
    for name, text in (("ca.crt", own.ca), ("tls.crt", own.certificate), ("tls.key", own.key)):
        (tmp_path / name).write_text(text)
    host = ("-verify_hostname", "podgpu-autoscale.podgpu.svc", "-attime", str(int(NOW) + 60))
    for words in (
        ("verify", "-x509_strict", "-purpose", "sslserver", *host, "-CAfile", "ca.crt", "tls.crt"),
        ("ec", "-in", "tls.key", "-check", "-noout"),
    ):
        done = subprocess.run(["openssl", *words], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


# The bundle


def test_a_bundle_keeps_other_replicas_and_drops_expired_cas() -> None:
    own, replica, expired = issued(), issued(), issued(NOW - 20 * DAY, NOW - 10 * DAY)
    bundle = merge_bundle(replica.ca + expired.ca + "garbage", [own.ca], OWN, NOW)
    assert parse_bundle_der(bundle) == parse_bundle_der(own.ca + replica.ca)
    assert merge_bundle(bundle, [own.ca], OWN, NOW) == bundle


def test_a_bundle_keeps_the_newest_cas() -> None:
    others = [issued(NOW + age) for age in range(MAX_CERTIFICATES + 5)]
    own = issued(ca_name=OWN)
    kept = parse_bundle_der(merge_bundle("".join(each.ca for each in others), [own.ca], OWN, NOW))
    assert kept == parse_bundle_der("".join(each.ca for each in (own, *reversed(others[6:]))))


@pytest.mark.fault(
    "a replica of podgpu autoscale crashes repeatedly",
    "its previous CAs are removed from the APIServices' bundles; the healthy replica's CA stays",
)
def test_a_replica_that_crashes_repeatedly_does_not_remove_the_cas_of_others() -> None:
    healthy = issued(NOW - DAY)
    bundle = healthy.ca
    for age in range(MAX_CERTIFICATES + 5):
        crashed = issued(NOW + age, ca_name=OWN)
        bundle = merge_bundle(bundle, [crashed.ca], OWN, NOW)
    found = parse_bundle_der(bundle)
    assert parse_bundle_der(healthy.ca)[0] in found
    assert found[0] == parse_bundle_der(crashed.ca)[0]
    assert len(found) == 3, "its own CA, its previous one, and the other replica's"


class Replica:
    """One replica, with time moved by hand."""

    def __init__(self, api: ApiDouble, name: str = "first") -> None:
        self.api = api
        self.seconds = 0.0
        self.clock = Clock(monotonic=lambda: self.seconds, wall=lambda: NOW + self.seconds)
        self.issuer = CertificateIssuer(SERVED.host_names, name, self.clock)

    def update(self, *moments: float) -> tuple[list[Issued], bool]:
        """The certificate that is used after an update at each of these moments; and whether it is ready."""

        async def run() -> tuple[list[Issued], bool]:
            async with self.api.running() as client:
                updater = CaBundleUpdater(client, self.issuer, NAMES, SERVED, self.clock)
                used = []
                for self.seconds in moments:
                    await updater.update()
                    used.append(self.issuer.current)
                return used, updater.ready

        return asyncio.run(run())


def make_api() -> ApiDouble:
    return ApiDouble(services={name: api_service() for name in NAMES})


def bundle_of(api: ApiDouble) -> set[bytes]:
    return {*parse_bundle_der(base64.b64decode(api.services[NAMES[0]]["spec"].get("caBundle", "")).decode())}


def test_the_ca_is_added_to_the_apiservices_and_nothing_else_is_changed() -> None:
    replica = Replica(api := make_api())
    assert replica.update(0.0, 30.0)[1]
    assert [name for name, _ in api.patches] == list(NAMES)
    assert {*api.patches[0][1]["spec"]} == {"caBundle", "insecureSkipTLSVerify"}
    assert bundle_of(api) == {*parse_bundle_der(replica.issuer.current.ca)}


def test_an_apiservice_of_another_service_is_not_changed(caplog: pytest.LogCaptureFixture) -> None:
    api = make_api()
    api.services[NAMES[1]] = api_service("monitoring", "prometheus-adapter")
    assert Replica(api).update(0.0, 30.0)[1]
    assert [name for name, _ in api.patches] == [NAMES[0]]
    assert caplog.text.count("points to monitoring/prometheus-adapter") == 1


def test_two_replicas_are_both_in_the_bundle_after_a_conflict() -> None:
    first, second = Replica(api := make_api(), "first"), Replica(api, "second")
    first.update(0.0)
    api.changes_after_get = True
    assert not second.update(0.0)[1]
    api.changes_after_get = False
    assert second.update(2.0)[1]
    first.update(30.0)
    assert bundle_of(api) == {*parse_bundle_der(first.issuer.current.ca + second.issuer.current.ca)}


def test_the_next_ca_is_in_the_bundle_before_it_is_used_and_the_previous_one_until_it_expires() -> None:
    replica = Replica(api := make_api())
    renewed = 7 * DAY
    moments = (0.0, renewed, renewed + OVERLAP_SECONDS - 1, renewed + OVERLAP_SECONDS)
    (first, *used, last), _ = replica.update(*moments)
    assert used == [first, first]
    assert last.ca != first.ca
    assert bundle_of(api) == {*parse_bundle_der(first.ca + last.ca)}
    replica.update(first.not_after - NOW + 1)
    assert parse_bundle_der(first.ca)[0] not in bundle_of(api)


def test_while_the_bundle_cannot_be_changed_the_previous_certificate_is_used() -> None:
    replica = Replica(api := make_api())
    (first,), _ = replica.update(0.0)
    api.is_ill = True
    assert replica.update(7 * DAY, 7 * DAY + 2 * OVERLAP_SECONDS) == ([first, first], False)


@pytest.mark.fault(
    "somebody deletes podgpu's APIServices",
    "a replica that starts then is ready, and adds its CA when they are back",
)
def test_a_missing_apiservice_does_not_prevent_readiness() -> None:
    api = make_api()
    del api.services[NAMES[1]]
    replica = Replica(api)
    assert replica.update(0.0)[1]
    api.services[NAMES[1]] = api_service()
    assert replica.update(2.0)[1]
    assert [name for name, _ in api.patches] == list(NAMES)
