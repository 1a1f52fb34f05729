"""Installs the guard in a process that a test starts. Python imports this file if its folder is on
PYTHONPATH.
"""

import os

from guard import NOTES, install_hook  # type: ignore[import-not-found]


def _note(what: str) -> None:
    with open(os.environ[NOTES], "a", encoding="utf-8") as file:
        file.write(f"{what}\n")


if NOTES in os.environ:
    install_hook(_note)
