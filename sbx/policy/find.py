"""Find the file of a policy by its name, in the shipped directory and the user's directories.

The file name is the name of the policy: `lab.toml` is the policy lab. The shipped policies are
found first. Then come the user's own: first in the directories passed as `search`, then in those of
the environment variable SBX_POLICY_DIRS (separated as in PATH; earlier directories win). No other
file may use a shipped name, so that `default` always means the policy of this project.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from sbx.errors import Broken, NotFound
from sbx.policy.checks import policy_name
from sbx.policy.problems import Problem, nearest, shown

ALIASES = {"python-default": "default"}


SEARCH_VARIABLE = "SBX_POLICY_DIRS"


class ProblemsError(Exception):
    """Carry problems up to `load`, which raises them, or `check`, which returns them."""

    def __init__(self, *problems: Problem, code: str | None = None) -> None:
        self.problems = list(problems)
        self.code = code


def reference(text: str) -> str | Path:
    return Path(text) if "/" in text or text.endswith(".toml") else text


def directories(search: Sequence[Path] = ()) -> tuple[Path, ...]:
    """Return the directories of policies, whether or not they exist; the shipped directory is
    first."""
    return (shipped_directory(), *dict.fromkeys((*search, *map(Path, _named_directories()))))


def shipped_directory() -> Path:
    """Return the directory of the shipped policies, in the installed package or in the checkout."""
    package = Path(__file__).parent.parent
    for directory in (package / "policies", package.parent / "policies"):
        if (directory / "default.toml").is_file():
            return directory
    raise Broken("the policies that come with sbx are missing", hint="install sbx again")


def _named_directories() -> list[str]:
    return [part for part in os.environ.get(SEARCH_VARIABLE, "").split(os.pathsep) if part]


def _own_directories(search: Sequence[Path]) -> list[Path]:
    """Return the user's directories in order.

    Skip a directory that does not exist. Report one that cannot be read, because it might contain a
    policy of the name.
    """
    # In PATH an empty entry means the working directory: here a trap in a cloned tree.
    named = [directory for directory in directories(search)[1:] if os.path.lexists(directory)]
    for directory in named:
        if not directory.is_dir():
            raise ProblemsError(Problem("is not a directory of policies", directory))
        if not os.access(directory, os.R_OK | os.X_OK, effective_ids=True):
            raise cannot_be_read(directory, "permission denied")
    return named


def named_files(search: Sequence[Path]) -> list[Path]:
    """Return the file of every name, shipped ones first; of the user's files with one name the
    earlier.

    Include a file that takes a shipped name, because it is an error that a list should show.
    """
    own: dict[str, Path] = {}
    for directory in _own_directories(search):
        for path in _files_of(directory):
            own.setdefault(path.stem, path)
    shipped = _files_of(shipped_directory())
    return [*shipped, *(path for path in own.values() if not any(_same(path, s) for s in shipped))]


def _files_of(directory: Path) -> list[Path]:
    """Return the policy files of a directory. Raise OSError if it cannot be opened.

    In Python 3.12 and later, Path.glob returns nothing for such a directory.
    """
    return sorted(directory / name for name in os.listdir(directory) if name.endswith(".toml"))


def _same(path: Path, other: Path) -> bool:
    return os.path.exists(path) and path.samefile(other)  # a symlink may be dangling


def locate(policy: str | Path, search: Sequence[Path]) -> Path:
    if isinstance(policy, Path):
        refuse_shipped_name(policy, policy.stem)
        return policy
    return find(policy, search)


def find(
    name: str,
    search: Sequence[Path],
    *,
    is_request: bool = True,
    listed: Sequence[Path] | None = None,
) -> Path:
    """Return the file of a name. A shipped name always means the shipped file.

    If another file takes a shipped name and `is_request` is set, report that file. A policy that
    only extends the name gets the shipped file. An error lists the policies in `listed`, by default
    all of `search`.
    """
    listed = search if listed is None else listed
    try:
        policy_name(name)
    except ValueError:
        raise _not_found(name, search, listed) from None
    candidates = [directory / f"{name}.toml" for directory in _own_directories(search)]
    own = [path for path in candidates if os.path.exists(path)]
    if (shipped := _shipped(name)).exists():
        for path in own if is_request else ():
            refuse_shipped_name(path, name)
        return shipped
    if own:
        return own[0]
    raise _not_found(name, search, listed)


def _shipped(name: str) -> Path:
    return shipped_directory() / f"{ALIASES.get(name, name)}.toml"


def refuse_shipped_name(path: Path, name: str) -> None:
    shipped = _shipped(name)
    if shipped.exists() and os.path.exists(path) and not _same(path, shipped):
        raise ProblemsError(
            Problem(
                f"{name} is the name of a policy that comes with sbx",
                path,
                hint=f'give the file another name; it may contain extends = "{name}"',
            ),
            code="policy_shadows",
        )


def _not_found(name: str, search: Sequence[Path], listed: Sequence[Path]) -> NotFound:
    names, shown_names = (
        [*dict.fromkeys(path.stem for path in named_files(places)), *ALIASES]
        for places in (search, listed)
    )
    near = nearest(name, names)
    if reference(name) != name:
        hint = "a string is the name of a policy; pass a pathlib.Path for a file"
    else:
        hint = (
            f"the policies are {', '.join(shown_names)}; {SEARCH_VARIABLE} names more directories"
        )
        if missing := [part for part in _named_directories() if not os.path.lexists(part)]:
            hint = f"{SEARCH_VARIABLE} names {missing[0]}, which does not exist"
    return NotFound(
        f"policy {shown(name)} does not exist" + (f"; did you mean {near}?" if near else ""),
        code="policy_not_found",
        hint=hint,
        details={"policy": name, "available": names, "nearest": near},
    )


def cannot_be_read(path: Path, why: str) -> ProblemsError:
    return ProblemsError(Problem(f"cannot be read: {why}", path))
