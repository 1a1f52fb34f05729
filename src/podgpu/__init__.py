"""podgpu: which pod uses which GPU, how much of it, and what that costs."""

__version__ = "0.3.0"

# These two names must be registered before anything is published. `make manifests` writes them and
# the version into every file that contains them.
PROJECT_URL = "https://github.com/podgpu/podgpu"
REGISTRY = "ghcr.io/podgpu"  # images: REGISTRY/podgpu; charts: oci://REGISTRY/charts/podgpu
