"""Frozen dataclasses as JSON and back, with errors that name the field."""

import dataclasses as dc
import json
import math
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from thinwire.errors import ProfileError

T = TypeVar("T")


def at_least_0(value: object, *names: str) -> None:
    """Raise `ProfileError` unless these fields are finite numbers of 0 or more."""
    for name in names:
        if not 0 <= getattr(value, name) < math.inf:
            raise ProfileError(f"{name}: expected a number of 0 or more, got {getattr(value, name)!r}")


def above_0(value: object, *names: str) -> None:
    """Raise `ProfileError` unless these fields are finite numbers above 0."""
    for name in names:
        if not 0 < getattr(value, name) < math.inf:
            raise ProfileError(f"{name}: expected a number above 0, got {getattr(value, name)!r}")


def as_dict(value: Any) -> Any:
    """Return a dataclass as what JSON holds: dicts, lists, numbers, texts, null."""
    if dc.is_dataclass(value):
        return {field.name: as_dict(getattr(value, field.name)) for field in dc.fields(value)}
    return [as_dict(item) for item in value] if isinstance(value, tuple) else value


def write(values: Mapping[str, object], path: Path) -> None:
    """Write JSON. Raises `ProfileError` where that cannot be."""
    try:
        path.write_text(json.dumps(values, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ProfileError(f"cannot write {path}: {error.strerror}") from error


def read(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises `ProfileError` where there is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # not JSON, or not UTF-8
        raise ProfileError(f"{path}: expected JSON, got something else: {error}") from error
    if not isinstance(values, dict):
        raise ProfileError(f"{path}: expected a JSON object, got {_kind(values)}")
    return values


def parse(kind: type[T], value: Any, where: str) -> T:
    """Return `value`, what JSON holds, as a `kind`: a frozen dataclass of numbers, texts, tuples and such dataclasses.

    Raises:
        ProfileError: it is none; the message begins with `where` and the path to the field.

    >>> from thinwire.advisor.profile import LinkClass
    >>> parse(LinkClass, {"alpha_s": 0.001, "beta": -1}, "profile.json: cluster.between")
    Traceback (most recent call last):
        ...
    thinwire.errors.ProfileError: profile.json: cluster.between: beta: expected a number above 0, got -1.0
    """
    return _parse(kind, value, where)


def _parse(kind: Any, value: Any, where: str) -> Any:
    if dc.is_dataclass(kind):
        return _parse_fields(kind, value, where)
    origin = get_origin(kind)
    if origin is types.UnionType:  # of a class and None
        chosen = next(option for option in get_args(kind) if option is not types.NoneType)
        return None if value is None else _parse(chosen, value, where)
    if origin is Literal:
        if value not in get_args(kind):
            raise ProfileError(f"{where}: expected one of {', '.join(get_args(kind))}, got {value!r}")
        return value
    if origin is tuple:
        return _parse_list(get_args(kind), value, where)
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind is str and isinstance(value, str):
        return value
    expected = {float: "a number", int: "a whole number", str: "a text"}[kind]
    hint = "; units are seconds and bytes, written as plain numbers" if isinstance(value, str) else ""
    raise ProfileError(f"{where}: expected {expected}, got {_kind(value)}{hint}")


def _parse_list(kinds: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ProfileError(f"{where}: expected a list, got {_kind(value)}")
    if kinds[-1] is ...:
        kinds = (kinds[0],) * len(value)
    if len(kinds) != len(value):
        raise ProfileError(f"{where}: expected a list of {len(kinds)}, got {len(value)}")
    return tuple(_parse(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(kinds, value, strict=True)))


def _parse_fields(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ProfileError(f"{where}: expected an object, got {_kind(value)}")
    hints = get_type_hints(kind)
    path = f"{where}." if ": " in where else f"{where}: "  # file: field.field
    if unknown := sorted(value.keys() - hints.keys()):
        raise ProfileError(f"{path}{unknown[0]}: no such field; expected {', '.join(hints)}")
    for field in dc.fields(kind):
        required = field.default is dc.MISSING and field.default_factory is dc.MISSING
        if required and field.name not in value:
            raise ProfileError(f"{path}{field.name}: expected this field, got none")
    found = {name: _parse(hints[name], item, f"{path}{name}") for name, item in value.items()}
    try:
        return kind(**found)
    except ProfileError as error:  # says which field, not where
        raise ProfileError(f"{where}: {error}") from error


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return repr(value)
