"""Packaging of podgpu: chart, plain manifests, image, systemd unit."""
