"""The files with settings: where they are, and how they are read.

    user's      ~/.config/sbx/sbx.toml, of root /etc/sbx/sbx.toml
    system's    /etc/sbx/sbx.toml
    working directory's   .env and sbx.toml: code in a sandbox, or the author of a cloned
                repository, can write these

Code inside can make any kind of file in its project. So the reader opens without blocking (a FIFO
stopped `sbx config` for good), demands a regular file of at most `SIZE_MAX`, and, in the working
directory, follows no symlink that leads out of it. A file that other users can write is refused.
"""

import json
import os
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from dotenv import dotenv_values
from platformdirs import user_config_path

from sbx.errors import BadRequest, Denied, NotFound, out_of_files
from sbx.linux import openat2

NAME = "sbx.toml"
SYSTEM = Path("/etc/sbx")
SIZE_MAX = 1 << 20
_WIDTH = 96
_HOW = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def config_directory() -> Path:
    """Return the directory of the user's own settings."""
    return SYSTEM if os.geteuid() == 0 else user_config_path("sbx")


def is_config_directory(directory: Path) -> bool:
    return os.path.realpath(directory) == os.path.realpath(config_directory())


def read(path: Path) -> str | None:
    """Return the text of a file that the user chose, or None if it does not exist."""
    return _read(path, within=False)


def read_users(config: Path | None) -> tuple[Path, str] | None:
    """Return the path and the text of the user's `sbx.toml`, or of the file `config` in its place;
    None if the user has none. Raises NotFound if `config` does not exist."""
    path = config or config_directory() / NAME
    if (text := read(path)) is not None:
        return path, text
    if config is not None:
        raise NotFound(f"file {config} does not exist", hint="name the file with the settings")
    return None


def read_in(directory: Path, name: str) -> str | None:
    """Return the text of a file of the working directory, or None if it does not exist."""
    return _read(directory / name, within=not is_config_directory(directory))


def toml(path: Path, text: str) -> dict[str, Any]:
    """Parse the text of a settings file. Raises BadRequest `invalid_settings`."""
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise BadRequest(
            f"{path} is not valid TOML: {error}",
            code="invalid_settings",
            hint="write it as name = value, one a line",
            details={"source": str(path)},
        ) from None


def read_env_file(path: Path) -> Mapping[str, str | None]:
    """Return the variables of a file that the user named. Raise NotFound."""
    if (text := read(path)) is None:
        raise NotFound(f"file {path} does not exist", hint="name the file with --env-file")
    return dotenv(text)


def dotenv(text: str) -> Mapping[str, str | None]:
    return dotenv_values(stream=StringIO(text), interpolate=False)


def not_allowed_here(path: Path, name: str, shown: str, decision: str, hint: str) -> Denied:
    """Return the error for a setting that a file of the working directory may not set."""
    return Denied(
        f"{path} may not set {shown}: it is a file of the working directory, and this setting"
        f" decides {decision}",
        code="setting_not_allowed_here",
        hint=hint,
        details={"setting": name, "source": str(path)},
    )


def _read(path: Path, *, within: bool) -> str | None:
    try:
        fd = _open_within(path) if within else os.open(path, _HOW)
        try:
            _check(path, os.fstat(fd))
            with os.fdopen(fd, "rb", closefd=False) as file:
                text = file.read(SIZE_MAX + 1)
        finally:
            os.close(fd)
        if len(text) > SIZE_MAX:
            raise _unusable(path, f"it is larger than {SIZE_MAX >> 20} MiB")
        return text.decode()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise out_of_files(error) or _unusable(path, str(error)) from None


def _open_within(path: Path) -> int:
    top = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if openat2.supported():
            name = os.fsencode(path.name)
            return openat2.openat2(top, name, _HOW, resolve=openat2.RESOLVE_BENEATH)
        return os.open(path.name, _HOW | os.O_NOFOLLOW, dir_fd=top)
    finally:
        os.close(top)


def _check(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise _unusable(path, "it is not a regular file")
    # It may name programs to run.
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & stat.S_IWOTH:
        raise Denied(
            f"{path} can be written by other users, so its settings are not taken",
            code="settings_not_private",
            hint=f"make it your own: chown, and chmod go-w '{path}'",
            details={"source": str(path)},
        )


def _unusable(path: Path, why: str) -> BadRequest:
    return BadRequest(
        f"{path} cannot be read: {why}",
        code="invalid_settings",
        hint="make it a regular file of at most 1 MiB; in the working directory it may not be a"
        " symlink that leads out of it",
        details={"source": str(path)},
    )


# -- the text of a file ---------------------------------------------------------------------------


def to_toml(table: Mapping[str, Any]) -> str:
    """Return a table as the text of a TOML file: values first, then tables and lists of tables.

    Omit None, which TOML does not have. tomli-w would write each list over several lines.
    """
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
