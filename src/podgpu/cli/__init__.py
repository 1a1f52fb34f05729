"""Implements the command line. Each command has its own module."""

from podgpu.cli.main import main

__all__ = ["main"]
