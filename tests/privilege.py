"""What is forbidden is seen as nobody: root may open everything."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

NOBODY = 65534


@contextmanager
def without_privilege() -> Iterator[None]:
    """Effective ids are the whole process's on Linux."""
    if os.geteuid() != 0:
        yield
        return
    try:
        os.seteuid(NOBODY)
    except OSError as error:
        pytest.skip(f"root opens everything, and cannot become nobody here: {error}")
    try:
        yield
    finally:
        os.seteuid(0)
