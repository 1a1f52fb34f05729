"""Decodes YAML files into typed structs, with errors that name the file and the path inside it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import yaml

from podgpu.decode import shorten_path
from podgpu.errors import UsageError, one_line

T = TypeVar("T")
_MAX_DEPTH = 100


class TextLoader(yaml.CSafeLoader):
    """Resolves only `null`, `true`, `false` and `<<`. Names such as `0123`, `1e3` or `on` stay text, as in Go."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML declares it this way
        first: [
            (tag, re.compile("true|false") if tag.endswith(":bool") else pattern)
            for tag, pattern in resolvers
            if tag.rpartition(":")[2] in ("null", "bool", "merge")
        ]
        for first, resolvers in yaml.CSafeLoader.yaml_implicit_resolvers.items()
    }


def decode_yaml(content: bytes, file: str, kind: type[T], decode_other: Callable[[type, Any], Any] | None = None) -> T:
    """Decodes a mapping; an empty file is an empty mapping. Raises UsageError.

    `decode_other` decodes types that msgspec does not know. Messages quote no value, because it may be a secret.
    """
    try:
        document = _load(content.decode("utf-8-sig"))
        return msgspec.convert({} if document is None else document, kind, strict=False, dec_hook=decode_other)
    except UnicodeDecodeError:
        raise UsageError(f"{file}: not UTF-8 text") from None
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}:" if error.problem_mark is not None else ""
        problem = re.sub(r"(['\"]).*\1", "…", error.problem or "cannot be parsed", flags=re.DOTALL)
        raise UsageError(one_line(f"{file}:{line} not YAML: {problem}")) from None
    except msgspec.ValidationError as error:
        raise UsageError(one_line(f"{file}: {shorten_path(error)}")) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{file}: not YAML that podgpu can read ({type(error).__name__})") from None


def _load(text: str) -> Any:
    depth = 0
    for event in yaml.parse(text, Loader=yaml.CSafeLoader):  # deep nesting would overflow PyYAML's stack
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise yaml.MarkedYAMLError(None, None, f"nested deeper than {_MAX_DEPTH} levels", event.start_mark)
    return yaml.load(text, Loader=TextLoader)
