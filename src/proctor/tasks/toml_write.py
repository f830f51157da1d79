"""Writing the small TOML files that imports make. Values are str, bool, int, float, lists and tables of those."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def dump_toml(document: Mapping[str, Any]) -> str:
    """TOML text of `document`: plain keys first, then tables, then arrays of tables. None values are left out.

    Tables inside an array of tables are written inline, one element to a block.
    """
    return "\n".join(_table(document, ())).strip("\n") + "\n"


def _table(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    lines = [f"{_key(key)} = {_value(value)}" for key, value in table.items() if _is_plain(value)]
    for key, value in table.items():
        if isinstance(value, dict):
            header = ".".join(_key(part) for part in (*path, key))
            lines += ["", f"[{header}]", *_table(value, (*path, key))]
        elif _is_array_of_tables(value):
            header = ".".join(_key(part) for part in (*path, key))
            for element in value:
                lines += ["", f"[[{header}]]"]
                lines += [f"{_key(name)} = {_value(one)}" for name, one in element.items() if one is not None]
    return lines


def _is_array_of_tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(one, dict) for one in value)


def _is_plain(value: Any) -> bool:
    return value is not None and not isinstance(value, dict) and not _is_array_of_tables(value)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _string(key)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(key)} = {_value(one)}" for key, one in value.items() if one is not None) + " }"
    if not value:
        return "[]"
    if len(value) == 1 and not isinstance(value[0], dict):
        return f"[{_value(value[0])}]"
    return "[\n" + "".join(f"  {_value(one)},\n" for one in value) + "]"
