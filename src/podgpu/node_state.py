"""Old name of `podgpu.model`, until all importers are converted."""

from podgpu.model import *  # noqa: F403
