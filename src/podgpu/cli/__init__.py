"""This room is the command `podgpu`: options, and which parts are put together. One file per command."""

from podgpu.cli.main import main

__all__ = ["main"]
