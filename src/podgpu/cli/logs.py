"""How log lines look: text for people, JSON for collectors. They go to standard error."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = f"{_time(record)} {record.levelname:<7} {record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def configure_logging(log_format: str, debug: bool) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if log_format == "json" else _Text())
    logging.basicConfig(level=logging.DEBUG if debug else logging.INFO, handlers=[handler], force=True)
    for noisy in ("asyncio", "aiohttp.access", "grpc"):
        logging.getLogger(noisy).setLevel(logging.INFO if debug else logging.WARNING)
