"""podgpu: which pod uses which GPU, how much of it, and what that costs."""

from __future__ import annotations

# The Python API, see docs/api.md.
__all__ = ["NodeState", "decode_node"]
__version__ = "0.3.0"

# These names must be registered before anything is published. `make manifests` writes the first two
# and the version into every file that contains them.
PROJECT_URL = "https://github.com/podgpu/podgpu"
REGISTRY = "ghcr.io/podgpu"  # images: REGISTRY/podgpu; charts: oci://REGISTRY/charts/podgpu
# For messages. Name no package on an index before it is ours: its owner could run code on nodes.
INSTALL_EXTRA = "pip install '.[{extra}]' in podgpu's source tree"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from podgpu.model import NodeState, decode_node
else:

    def __getattr__(name: str) -> object:
        """Imports the Python API on first use, because every command imports this module."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from podgpu import model

        return getattr(model, name)
