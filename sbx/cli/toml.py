"""Write a policy as the text of a policy file, which `check` and `load` can read."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_WIDTH = 96


def dumps(table: Mapping[str, Any]) -> str:
    """Return a table as TOML: values first, then tables and lists of tables. Omit None, which TOML
    does not have."""
    return "\n".join(_lines(table, "")) + "\n"


def _lines(table: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in table.items():
        if value is not None and not _is_table(value) and not _is_tables(value):
            yield f"{_key(key)} = {_value(value)}"
    for key, value in table.items():
        name = f"{prefix}{_key(key)}"
        if _is_table(value):
            yield from ("", f"[{name}]", *_lines(value, f"{name}."))
        elif _is_tables(value):
            for entry in value:
                yield from ("", f"[[{name}]]", *_lines(entry, f"{name}."))


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_table, value))


def _key(key: str) -> str:
    bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if bare else _value(key)


def _value(value: Any) -> str:
    if not isinstance(value, list):
        # JSON and TOML write text, numbers and booleans alike, except for DEL. Escape C1
        # characters, too, so that no terminal interprets them as escape sequences.
        text = json.dumps(value, ensure_ascii=False)
        return re.sub(r"[\x7f-\x9f]", lambda match: f"\\u{ord(match[0]):04x}", text)
    items = [_value(item) for item in value]
    line = f"[{', '.join(items)}]"
    if len(line) <= _WIDTH:
        return line
    return "[\n" + "".join(f"  {item},\n" for item in items) + "]"
