"""The place where the tools of an agent work: what its policy, its host and its project permit."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from sbx.protocol.languages import ALIASES, LANGUAGES, Language

# An own workspace, a directory of the user in a sandbox, or the host without a sandbox.
Place = Literal["workspace", "directory", "host"]
_WORKSPACE = "/workspace"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """`directory` is the path of the working directory as code sees it. `languages` are those of
    scripts, without Python. Cells need the capability `python`, commands and scripts `shell`, and
    file tools `filesystem`."""

    place: Place = "workspace"
    directory: str = _WORKSPACE
    capabilities: tuple[str, ...] = ("python", "shell", "filesystem")
    languages: tuple[Language, ...] = LANGUAGES

    @property
    def shown_directory(self) -> str:
        return printable(self.directory)

    @property
    def run_languages(self) -> list[str]:
        """Return the languages of `run_code` by name and alias."""
        names: Collection[str] = self.languages if "shell" in self.capabilities else ()
        if "python" in self.capabilities:
            names = ("python", *names)
        every = ("python", *LANGUAGES, *ALIASES)
        return [name for name in every if ALIASES.get(name, name) in names]


def printable(path: str) -> str:
    """Return a path that cannot pass for another line of a prompt."""
    return path if path.isprintable() else ascii(path)


def surroundings_from_json(reply: Mapping[str, Any]) -> Surroundings:
    """Return the surroundings in a reply. Raise KeyError, TypeError, ValueError."""
    place, directory = reply["place"], reply["directory"]
    if place not in get_args(Place) or not isinstance(directory, str):
        raise ValueError("an unknown place")
    languages = tuple(name for name in LANGUAGES if name in reply["languages"])
    return Surroundings(place, directory, tuple(map(str, reply["capabilities"])), languages)
