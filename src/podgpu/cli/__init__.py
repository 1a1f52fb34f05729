"""The command line of podgpu. Each command has its own module, which parses the options and starts the command."""

from podgpu.cli.main import main

__all__ = ["main"]
