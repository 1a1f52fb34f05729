"""A small Kubernetes client: configuration, credentials, requests, and local copies of API objects.

Built on aiohttp, because the official client needs 40 to 70 MiB of memory.
"""
