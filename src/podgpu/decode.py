"""Decodes JSON from other programs and YAML files from users into typed structs."""

from __future__ import annotations

import re
import threading
from typing import Any, TypeVar

import msgspec
import yaml
from msgspec import inspect

from podgpu.errors import SourceError, UsageError, one_line

T = TypeVar("T")
_MAX_DEPTH = 100
BAD_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What a decoder raises if the content is not JSON of its type."""
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_lock = threading.Lock()


def find_decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """Returns the JSON decoder of a type, and caches it.

    msgspec can crash if two threads use a type for the first time at the same moment. To prevent
    this, decode only with this function, with `convert`, or with a decoder that is created when its
    module is imported.
    """
    with _lock:
        if kind not in _decoders:
            _decoders[kind] = msgspec.json.Decoder(kind)
        return _decoders[kind]


def convert(value: Any, kind: type[T], *, strict: bool = True) -> T:
    """Converts parsed JSON or YAML to a type. Raises msgspec.ValidationError if that fails."""
    # Prepares the type for its first use.
    find_decoder(kind)
    return msgspec.convert(value, kind, strict=strict)


def format_error(error: Exception) -> str:
    """Returns the message of a msgspec error with the path first.

    For example: "users[0].name: expected `str`, got `int`".
    """
    if isinstance(error, RecursionError):
        # Each version of Python has its own text.
        return "it is nested too deeply"

    message, _, path = str(error).partition(" - at `$")
    # An abbreviation such as JSON keeps its capitals.
    if message[1:2].islower():
        message = message[:1].lower() + message[1:]
    if not path:
        return message
    path = path.rstrip("`").lstrip(".")
    return f"{path}: {message}"


def decode_json(content: bytes, path: str, kind: type[T]) -> T:
    """Decodes JSON that another program wrote to `path`.

    Raises SourceError if the JSON does not match `kind`.
    """
    try:
        return find_decoder(kind).decode(content)
    except BAD_JSON as error:
        problem = format_error(error) if content else "it is empty"
        raise malformed(path, problem) from error


def malformed(path: str, problem: str) -> SourceError:
    return SourceError(
        "malformed",
        f"{path} cannot be decoded ({one_line(problem)[:200]}): "
        "if this persists, check the program that writes it",
    )


def _select_resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """Returns PyYAML's resolvers of `null`, booleans and `<<`, by the first character of a value.

    Only `true` and `false` are booleans.
    """
    boolean = re.compile("(?:true|false)$")
    selected: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for first, resolvers in yaml.CSafeLoader.yaml_implicit_resolvers.items():
        own = []
        for tag, pattern in resolvers:
            _, _, kind = tag.rpartition(":")
            if kind == "bool":
                own.append((tag, boolean))
            elif kind in ("null", "merge"):
                own.append((tag, pattern))

        selected[first] = own

    return selected


class _TextLoader(yaml.CSafeLoader):
    """Interprets only `null`, `true`, `false` and `<<`.

    Other values, such as `0123`, `1e3` or `on`, stay text.
    """

    yaml_implicit_resolvers = _select_resolvers()

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuses keys that are repeated. PyYAML would use only the last one."""
        seen = set()
        for key, _ in node.value:
            # PyYAML uses all `<<` of a mapping.
            is_merge = key.tag.endswith(":merge")
            if is_merge or not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                problem = f"the key {key.value[:60]} is repeated"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)

        return super().construct_mapping(node, deep=deep)


def _require_shallow(text: str, file: str) -> None:
    """Raises UsageError if the nesting is so deep that it would overflow PyYAML's stack."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.CSafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > _MAX_DEPTH:
            raise UsageError(f"{file}: nested deeper than {_MAX_DEPTH} levels")


def _find_type(outer: inspect.Type, step: str) -> inspect.Type | None:
    """Returns the type of a field (`.name`), or of the elements of a collection (`[...]`)."""
    inner: inspect.Type | None = None
    if isinstance(outer, inspect.DictType):
        inner = outer.value_type
    elif isinstance(outer, inspect.ListType | inspect.VarTupleType):
        inner = outer.item_type
    elif isinstance(outer, inspect.StructType):
        for field in outer.fields:
            if step == f".{field.encode_name}":
                inner = field.type

    # Of `list[Rule] | None`, the first type has the keys.
    if isinstance(inner, inspect.UnionType):
        return inner.types[0]
    return inner


def _list_keys(error: msgspec.ValidationError, kind: Any) -> str:
    """Lists the valid keys if the error is about an unknown key."""
    message, _, path = str(error).partition(" - at `$")
    if "unknown field" not in message:
        return ""

    # The steps of `.users[0].name` are `.users`, `[0]` and `.name`.
    struct: inspect.Type | None = inspect.type_info(kind)
    for step in re.findall(r"\.[^.\[`]+|\[[^]]*\]", path):
        if struct is not None:
            struct = _find_type(struct, step)

    if not isinstance(struct, inspect.StructType):
        return ""
    return f"; valid keys are {', '.join(field.encode_name for field in struct.fields)}"


def decode_yaml(content: bytes, file: str, kind: type[T]) -> T:
    """Decodes a YAML mapping. An empty file counts as an empty mapping.

    Raises UsageError if the file is invalid. Error messages do not quote values, because a value
    may be a secret.
    """
    try:
        text = content.decode("utf-8-sig")
        _require_shallow(text, file)
        document = yaml.load(text, Loader=_TextLoader)
        return convert({} if document is None else document, kind, strict=False)
    except UnicodeDecodeError:
        raise UsageError(f"{file}: not UTF-8 text") from None
    except yaml.MarkedYAMLError as error:
        line = ""
        if error.problem_mark is not None:
            line = f" line {error.problem_mark.line + 1}:"
        # PyYAML quotes a part of the file.
        problem = re.sub(r"(['\"]).*\1", "…", error.problem or "cannot be parsed", flags=re.DOTALL)
        raise UsageError(one_line(f"{file}:{line} not YAML: {problem}")) from None
    except msgspec.ValidationError as error:
        problem = format_error(error) + _list_keys(error, kind)
        raise UsageError(one_line(f"{file}: {problem}")) from None
    except (
        yaml.YAMLError,
        ValueError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        # For a value with a wrong tag, such as `!!bool x`, PyYAML raises built-in errors of various
        # types.
        raise UsageError(
            f"{file}: not YAML that podgpu can read ({type(error).__name__})"
        ) from None
