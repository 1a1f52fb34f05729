"""This room asks exporters for expositions, and whoever else for JSON, over `http/` and bounded in size and time.

- `access.py`: `Access` says how to be let in (TLS, a login or a token, more headers) and under which prefix the options
  are called that messages name: `Access(token_file=…, headers=(("X-Scope-OrgID", "a"),), prefix="prometheus",
  server="Prometheus")`. `Credentials(access)` carries it out, and is to be shared by all that are asked with it.
- `endpoint.py`: `Endpoint(url, access_or_credentials, deadline=…, largest=…)`, and with it
  `await endpoint.ask(session, "POST", "/api/v1/query", {"query": "up"}, accept="application/json") -> Answer`
  (`status`, `body` unpacked, `content_type`, `reason`, `location`). What the network, TLS, a deadline or a size does
  to it is a SourceError (`timeout`, `tls`, `truncated`, `unreachable`, `too_large`, `malformed`, `unauthorized` for a
  secret that cannot be sent). Any status is an answer; `endpoint.refused(answer)` is the SourceError to raise for one
  that is not wanted (`unauthorized`, `http_503`, …). `endpoint.shown` is the URL without secrets. No redirect is
  followed. `open_session()` of `http/exchange.py` gives the aiohttp session that `ask` wants: on the running loop, open
  between requests, closed by its owner.
- `exposition.py`: `UrlExposition` and `FileExposition`, what an exporter wrote as bytes: `fetch()` waits,
  `await fetch_with(session)` for a loop that does other things meanwhile.
"""
