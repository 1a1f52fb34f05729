"""A mapping in a YAML file that knows where it stands, so that every complaint names file and field.

Complaints never quote what stands in a field: it may be a secret.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from podgpu.errors import SourceError

_LARGEST_FILE = 8 * 1024 * 1024


class _PlainLoader(yaml.SafeLoader):
    """Knows true, false, null and merge keys; all else is text, so that a name like 0123, 1e3 or on stays itself."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - so PyYAML has it


_PlainLoader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^(?:[Tt]rue|[Ff]alse)$"), list("tTfF"))
_PlainLoader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("^(?:null|~|)$"), ["n", "~", ""])
_PlainLoader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile("^<<$"), ["<"])


@dataclass(frozen=True, slots=True)
class Section:
    file: str
    where: str
    """Path inside the file, as `users[alice].user`; empty for the whole."""
    values: dict[Any, Any] = field(repr=False)

    def bad(self, name: str, problem: str) -> SourceError:
        path = f"{self.where}.{name}" if self.where and name else self.where or name
        return SourceError("bad_kubeconfig", f"{self.file}: {path or 'the file'} {problem}")

    def has(self, name: str) -> bool:
        return self.values.get(name) not in (None, "")

    def text(self, name: str) -> str:
        value = self.values.get(name)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self.bad(name, "is not a text")
        if not _is_clean(value):
            raise self.bad(name, "holds characters that no name or path can have")
        return value

    def flag(self, name: str) -> bool:
        value = self.values.get(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise self.bad(name, "is neither true nor false")

    def texts(self, name: str) -> tuple[str, ...]:
        value = self.values.get(name) or []
        if not isinstance(value, list) or not all(isinstance(one, str) and _is_clean(one) for one in value):
            raise self.bad(name, "is not a list of texts (put numbers in quotes)")
        return tuple(value)

    def child(self, name: str) -> Section:
        """The mapping under a name; an empty one where nothing is written."""
        return self._section(name, self.values.get(name))

    def children(self, name: str) -> Iterator[Section]:
        value = self.values.get(name) or []
        if not isinstance(value, list):
            raise self.bad(name, "is not a list")
        for number, one in enumerate(value):
            yield self._section(f"{name}[{number}]", one)

    def path(self, name: str) -> str:
        """A file named in this file is looked for beside it."""
        text = self.text(name)
        return os.path.join(os.path.dirname(os.path.abspath(self.file)), text) if text else ""

    def decoded(self, name: str) -> str:
        """The text inside a base64 field."""
        try:
            return base64.b64decode("".join(self.text(name).split()), validate=True).decode("ascii")
        except (binascii.Error, ValueError) as error:
            raise self.bad(name, "is not PEM in base64") from error

    def _section(self, name: str, value: object) -> Section:
        if value is not None and not isinstance(value, dict):
            raise self.bad(name, "is not a mapping")
        return Section(self.file, f"{self.where}.{name}" if self.where else name, value or {})


def _is_clean(text: str) -> bool:
    """NUL ends a path early; half of a surrogate pair cannot be written as UTF-8 at all."""
    return "\0" not in text and not any("\ud800" <= one <= "\udfff" for one in text)


def read_sections(file: str) -> Section:
    """The whole file as a section."""
    try:
        with open(file, "rb") as opened:
            content = opened.read(_LARGEST_FILE + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SourceError("bad_kubeconfig", f"cannot read the kubeconfig {file}: {reason}") from error
    if len(content) > _LARGEST_FILE:
        raise SourceError("bad_kubeconfig", f"{file} is larger than 8 MiB: it is no kubeconfig")
    return parse_sections(content, file)


def parse_sections(content: bytes, file: str) -> Section:
    try:
        # _PlainLoader is a SafeLoader: it makes nothing but texts, lists and mappings.
        value = yaml.load(content.decode("utf-8-sig"), Loader=_PlainLoader)
    except UnicodeDecodeError as error:
        raise SourceError("bad_kubeconfig", f"{file} is not UTF-8 text: it is no kubeconfig") from error
    except yaml.MarkedYAMLError as error:
        # Not str(error): that quotes the line, and the line may hold a token.
        line = "" if error.problem_mark is None else f" in line {error.problem_mark.line + 1}"
        raise SourceError("bad_kubeconfig", f"{file} is not YAML: {error.problem}{line}") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        # PyYAML raises most of these for values that do not fit their explicit tag, such as `!!int ''`.
        raise SourceError("bad_kubeconfig", f"{file} is not YAML podgpu can read ({type(error).__name__})") from None
    if value is not None and not isinstance(value, dict):
        raise SourceError("bad_kubeconfig", f"{file} is not a mapping: it is no kubeconfig")
    return Section(file, "", value or {})
