"""Tables of a JSON file as frozen dataclasses, every field checked and named by its path."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar, cast, get_args, get_type_hints

import cattrs

from pageturner.service.codec import strict_converter

Kind = TypeVar("Kind")

_CONVERTER = strict_converter()


def read_table(kind: type[Kind], table: object, path: str = "") -> Kind:
    """`kind`, a dataclass, with the fields of `table`, dataclasses within it too.

    path: of the table in its file, with a dot after it. Raises ValueError, which names the first field that
    is unknown, missing, of another type, or out of range.
    """
    if not isinstance(table, dict):
        raise ValueError(f"{path.rstrip('.') or 'the file'} is not a table")
    annotations = get_type_hints(kind)
    unknown = table.keys() - annotations.keys()
    if unknown:
        raise ValueError(f"{path}{min(unknown, key=str)} is unknown")
    values = {}
    for field in fields(cast(Any, kind)):
        if field.name in table:
            values[field.name] = _read(annotations[field.name], table[field.name], f"{path}{field.name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{path}{field.name} is missing")
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{path}{error}") from error


def _read(annotation: Any, value: object, path: str) -> Any:
    table = next((each for each in (annotation, *get_args(annotation)) if is_dataclass(each)), None)
    if table is not None and value is not None:
        return read_table(cast(type[Any], table), value, f"{path}.")
    try:
        return _CONVERTER.structure(value, annotation)
    except (TypeError, ValueError, cattrs.errors.CattrsError, cattrs.StructureHandlerNotFoundError) as error:
        raise ValueError(f"{path}: {error}") from error
