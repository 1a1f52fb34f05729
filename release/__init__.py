"""Builds everything that a release publishes. `make release` writes it to dist/."""
