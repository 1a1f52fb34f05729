"""Runs the command `podgpu` for `python -m podgpu`."""

from podgpu.cli import main

main()
