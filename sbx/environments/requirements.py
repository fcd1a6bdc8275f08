"""What may be asked for: names of packages, with versions, and nothing that steers the installer.

A line is a requirement of PEP 508, as `numpy`, `pandas>=2`, `httpx[http2]` or
`tiny @ file:///wheels/tiny-1.0-py3-none-any.whl`; in a file it may have `--hash` options, which the
lock then has to agree with. Every other option is refused, wherever it stands: which index is asked
is chosen by whoever configured pip or uv, never by a list of packages.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from sbx.errors import BadRequest

# What the kernel inside needs, as pyproject.toml has it; brings IPython, comm, matplotlib-inline.
KERNEL = "ipykernel>=6.29"
_MOST = 10_000
_LINE_MAX = 4000
_HASH = re.compile(r"--hash[= ](sha256|sha384|sha512):([0-9a-f]{64,128})")
_OPTIONS = re.compile(r"\s--?[A-Za-z]")
_PINNED = re.compile(r"(?P<what>\S+==\S+|\S+ @ \S+)(?P<hashes>(?: --hash=\w+:[0-9a-f]+)*)")


@dataclass(frozen=True, slots=True)
class PackageRequirement:
    """One requirement, in canonical words. `hashes` (`sha256:…`), where any were given."""

    name: str
    text: str
    hashes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LockFile:
    """One package of a lock: `name==version` or `name @ url`, and the hashes of its files."""

    name: str
    text: str
    hashes: tuple[str, ...]


def of_words(words: Iterable[str]) -> list[PackageRequirement]:
    """The PACKAGE arguments of a command. Raises BadRequest `invalid_requirement`."""
    return [_wanted(word, "", where=f"{word!a}") for word in words]


def of_file(text: str, name: str) -> list[PackageRequirement]:
    """The lines of a requirements file. Raises BadRequest `invalid_requirement`, with the line."""
    found: list[PackageRequirement] = []
    for number, line in _lines(text):
        if len(found) >= _MOST:
            raise _invalid(f"{name} has more than {_MOST:,} requirements")
        requirement, options = _split(line)
        found.append(_wanted(requirement, options, where=f"{name}:{number}: {line[:200]!a}"))
    return found


def refuse_sources(wanted: Iterable[PackageRequirement]) -> None:
    """Raises BadRequest `invalid_requirement` for a URL that is none of a wheel.

    pip, told to take wheels only, still builds what a URL names: its code would run here.
    """
    for one in wanted:
        url = Requirement(one.text).url
        if url is not None and not urlsplit(url).path.endswith(".whl"):
            raise _invalid(
                f"{one.text!a} is no wheel, and to build one runs its code on this host, as you",
                hint="name a wheel (.whl), or give --build if you trust it",
            )


def with_kernel(wanted: Sequence[PackageRequirement]) -> list[PackageRequirement]:
    """What is asked of the resolver: the wanted, and what the kernel needs."""
    return [*wanted, *of_words([KERNEL])]


def locked(text: str) -> list[LockFile]:
    """What a lock says. Raises ValueError for one in which something has no hash."""
    found = []
    for _, line in _lines(text):
        pinned = _PINNED.fullmatch(re.sub(r"\s+--hash", " --hash", line))
        if pinned is None or not pinned["hashes"]:
            raise ValueError(line)
        what = pinned["what"]
        name = canonicalize_name(re.split(r"==| @ |\[", what)[0])
        hashes = tuple(one.removeprefix("--hash=") for one in pinned["hashes"].split())
        found.append(LockFile(name, what, hashes))
    return found


def lock_text(packages: Iterable[LockFile]) -> str:
    """As `pip install --require-hashes -r` takes it."""
    return "".join(
        " \\\n    ".join([one.text, *(f"--hash={value}" for value in one.hashes)]) + "\n"
        for one in sorted(packages, key=lambda one: one.name)
    )


def agreed(packages: Iterable[LockFile], wanted: Iterable[PackageRequirement]) -> list[LockFile]:
    """The lock with no hash that those given leave out. Raises BadRequest `hash_mismatch`."""
    given: dict[str, set[str]] = {}
    for one in wanted:
        if one.hashes:
            given.setdefault(one.name, set()).update(one.hashes)
    return [_agreed(one, given.get(one.name)) for one in packages]


def _agreed(package: LockFile, given: set[str] | None) -> LockFile:
    if given is None:
        return package
    kept = tuple(one for one in package.hashes if one in given)
    if not kept:
        raise BadRequest(
            f"{package.text} has none of the hashes that were asked for",
            code="hash_mismatch",
            hint="look whether the file that the index offers is the one that you mean",
            details={"found": list(package.hashes), "given": sorted(given)},
        )
    return LockFile(package.name, package.text, kept)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Logical lines, with the number of the first physical one; no comments, nothing empty."""
    held, start = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        start = start if held else number
        said = "" if line.lstrip().startswith("#") else line
        if said.endswith("\\"):
            held += said[:-1] + " "
            continue
        whole = re.sub(r"(^|\s)#.*$", "", held + said).strip()
        held = ""
        if whole:
            yield start, whole
    if held.strip():
        yield start, held.strip()


def _split(line: str) -> tuple[str, str]:
    """A requirement, and the options behind it."""
    options = _OPTIONS.search(line)
    return (line[: options.start()], line[options.start() :]) if options else (line, "")


def _wanted(text: str, options: str, *, where: str) -> PackageRequirement:
    text = text.strip()
    if len(text) > _LINE_MAX or not text.isprintable():
        raise _invalid(f"{where[:300]} is no requirement")
    if text.startswith("-") or _HASH.sub("", options).strip():
        raise _invalid(
            f"{where} is an option, and only names of packages are taken",
            hint="indexes are configured for pip or uv themselves: pip config, PIP_*, UV_*",
        )
    if "${" in text:
        raise _invalid(f"{where} takes text from a variable of the environment")
    try:
        found = Requirement(text)
    except InvalidRequirement as error:
        raise _invalid(
            f"{where} is no requirement: {str(error).splitlines()[0]}",
            hint="as in numpy, 'pandas>=2', or 'tiny @ file:///path/tiny-1.0-py3-none-any.whl'",
        ) from None
    if found.url is not None:
        _check_url(found.url, where)
    hashes = tuple(f"{kind}:{value}" for kind, value in _HASH.findall(options))
    return PackageRequirement(canonicalize_name(found.name), str(found), hashes)


def _check_url(url: str, where: str) -> None:
    try:
        parts = urlsplit(url)
        scheme, login = parts.scheme, parts.username or parts.password
    except ValueError:
        scheme, login = "", None
    if scheme not in ("https", "http", "file"):
        raise _invalid(
            f"{where} is nothing that can be locked by a hash",
            hint="name a released version, or a file by https:// or file://",
        )
    if login:
        raise _invalid(
            f"{where} has a password in it, and the lock is for everybody to read",
            hint="put it into ~/.netrc, or configure pip's keyring",
        )


def _invalid(message: str, *, hint: str | None = None) -> BadRequest:
    return BadRequest(
        message, code="invalid_requirement", hint=hint or "one package a word, as in 'pandas>=2'"
    )
