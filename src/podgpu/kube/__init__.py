"""The Kubernetes API, as far as podgpu needs it: who we are, one question, one collection kept up to date. Reads only.

Stands below `allocation/`: knows errors, and nothing else of podgpu. Made of aiohttp, because the official client
weighs 40 to 70 MiB.
"""
