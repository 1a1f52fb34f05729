"""This room owns how podgpu asks anybody over HTTP: one bounded exchange, for the Kubernetes API client and for
`fetch/` alike.

- `exchange.py` sends a question and reads the answer whole, or hands it out as it arrives.
- `receive.py` bounds and unpacks an answer's body.
- `failure.py` says in plain words why there is no answer.
- `aside.py` reads files beside an event loop.
- `tls.py` turns certificates and keys into TLS contexts, and is the one place where a key becomes a file for OpenSSL.
"""
