"""How podgpu is shipped: chart, plain manifests, image, systemd unit."""
