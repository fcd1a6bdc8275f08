"""Files of the operator, in TOML: profiles of agents, sources of tools, templates of tasks."""

import os
import stat
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from msgspec import Struct
from pydantic import BaseModel, ConfigDict, ValidationError

from sbx.errors import BadRequest, Unavailable

_FILE_MAX = 256 << 10  # bytes
_FILES_MAX = 1000
_PROBLEMS_MAX = 20


class OperatorTable(BaseModel):
    """A table of such a file. It has no other fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


T = TypeVar("T", bound=OperatorTable)


class OperatorFiles(Struct, Generic[T], frozen=True):
    """One kind of file: `{directory}/{name}.toml` has the fields of `model`. `noun` is for
    messages, `code` is that of their errors, and `page` documents the fields."""

    model: type[T]
    noun: str
    code: str
    page: str

    def parse(self, text: str, origin: str) -> T:
        """Return the content of a text; `origin` names the text. Raise BadRequest, with each
        problem in the details."""
        try:
            return self.model(**tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise self._invalid(origin, [str(error)]) from None
        except ValidationError as error:
            problems = error.errors(include_url=False, include_input=False, include_context=False)
            raise self._invalid(origin, [self._problem(each) for each in problems]) from None

    def read(self, path: Path) -> T:
        """Raise BadRequest, also for a file that cannot be read."""
        try:
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_mode & stat.S_IWOTH:
                    raise OSError(0, "every user of this host can write it")
                data = file.read(_FILE_MAX + 1)
            if len(data) > _FILE_MAX:
                raise OSError(0, f"it is larger than {_FILE_MAX >> 10} KiB")
            text = data.decode()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            message = f"the {self.noun} {path.name} cannot be read: {reason}"
            raise BadRequest(message, code=self.code) from None
        return self.parse(text, path.name)

    def list(self, directory: Path) -> dict[str, Path]:
        """Return the files by their names. Names of requests are compared with them, and never
        become a path. Raise Unavailable: none is left out silently, for it may be a limit."""
        try:
            names = sorted(name for name in os.listdir(directory) if name.endswith(".toml"))
        except FileNotFoundError:
            return {}
        except OSError as error:
            message = f"the directory of {self.noun} files cannot be read: {error.strerror}"
            raise Unavailable(message, code=self.code) from None
        if len(names) > _FILES_MAX:
            message = f"there are more than {_FILES_MAX} {self.noun} files"
            raise Unavailable(message, code=self.code)
        return {name.removesuffix(".toml"): directory / name for name in names}

    def _problem(self, error: Any) -> str:
        place = ".".join(map(str, error["loc"]))
        text = error["msg"].removeprefix("Value error, ")
        if error["type"] == "extra_forbidden":
            text = f"a {self.noun} has no such field"
        return f"{place}: {text}" if place else text

    def _invalid(self, origin: str, problems: Sequence[str]) -> BadRequest:
        return BadRequest(
            f"{origin} is not a valid {self.noun}: {problems[0]}",
            code=self.code,
            hint=f"{self.page} has every field",
            details={"problems": list(problems[:_PROBLEMS_MAX])},
        )
