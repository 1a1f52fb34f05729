"""One set of certificates for all tests here: they take openssl a second to make."""

from __future__ import annotations

import pytest

from tests.autoscale.authorities import Authorities, make_authorities


@pytest.fixture(scope="session")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> Authorities:
    return make_authorities(tmp_path_factory.mktemp("authorities"))
