"""A small Kubernetes client: configuration, credentials, requests, and stores kept equal to a collection.

Built on aiohttp, because the official client needs 40 to 70 MiB of memory.
"""
