"""This room owns the Kubernetes API as far as podgpu needs it: who we are, one question, one collection kept fresh.
Read only.

It stands below `holders/`: it knows errors, files and `http/`, and nothing else of podgpu. It is made of aiohttp,
because the official client weighs 40 to 70 MiB.
"""
