"""This module lets `python -m podgpu` do what the command `podgpu` does."""

from podgpu.cli import main

main()
