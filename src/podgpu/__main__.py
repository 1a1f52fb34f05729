"""`python -m podgpu`."""

from podgpu.cli import main

main()
