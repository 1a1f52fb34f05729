"""GPUs and MIG devices for the tests of allocation sources, and a check of error messages."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from podgpu.errors import SourceError
from podgpu.model import Device


def uuid(number: int) -> str:
    return f"GPU-0000000{number}-1111-2222-3333-444444444444"


def mig_uuid(letter: str) -> str:
    return f"MIG-{letter * 8}-1111-2222-3333-444444444444"


def gpu(number: int) -> Device:
    return Device(number, uuid(number), f"00000000:0{number}:00.0", "NVIDIA A100", minor=number)


def failure(call: Callable[[], object], *in_message: str) -> SourceError:
    """Returns the SourceError of a call. Checks that its message has one line and contains these
    texts.
    """
    with pytest.raises(SourceError) as caught:
        call()
    assert "\n" not in str(caught.value)
    for part in in_message:
        assert part in str(caught.value)
    return caught.value
