"""Valid requirements: names of packages with versions, and no options for the installer.

A line is a requirement of PEP 508, such as `numpy`, `pandas>=2`, `httpx[http2]` or
`tiny @ file:///wheels/tiny-1.0-py3-none-any.whl`. In a file it may have `--hash` options, and the
lock must agree with them. Every other option is refused at any place: the configuration of pip or
uv chooses the index, never a list of packages.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from urllib.parse import urlsplit

from msgspec import Struct
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from sbx.errors import BadRequest

# The kernel needs it, as in pyproject.toml; it brings IPython, comm and matplotlib-inline.
KERNEL = "ipykernel>=6.29"
_MOST = 10_000
_LINE_MAX = 4000
_HASH = re.compile(r"--hash[= ](sha256|sha384|sha512):([0-9a-f]{64,128})")
_OPTIONS = re.compile(r"\s--?[A-Za-z]")
_PINNED = re.compile(r"(?P<what>\S+==\S+|\S+ @ \S+)(?P<hashes>(?: --hash=\w+:[0-9a-f]+)*)")


class PackageRequirement(Struct, frozen=True):
    """One requirement in canonical form. `hashes` (`sha256:…`) of the author, if there are any."""

    name: str
    text: str
    hashes: tuple[str, ...] = ()


class LockFile(Struct, frozen=True):
    """One package of a lock: `name==version` or `name @ url`, and the hashes of its files."""

    name: str
    text: str
    hashes: tuple[str, ...]


def parse_words(words: Iterable[str]) -> list[PackageRequirement]:
    """Parse the PACKAGE arguments of a command. Raise BadRequest `invalid_requirement`."""
    return [_parse_requirement(word, "", where=f"{word!a}") for word in words]


def parse_file(text: str, name: str) -> list[PackageRequirement]:
    """Parse a requirements file. Raise BadRequest `invalid_requirement`, with the line."""
    requirements: list[PackageRequirement] = []
    for number, line in _lines(text):
        if len(requirements) >= _MOST:
            raise _invalid(f"{name} has more than {_MOST:,} requirements")
        requirement, options = _split(line)
        requirements.append(
            _parse_requirement(requirement, options, where=f"{name}:{number}: {line[:200]!a}")
        )
    return requirements


def refuse_sources(requirements: Iterable[PackageRequirement]) -> None:
    """Raise BadRequest `invalid_requirement` for a URL that does not name a wheel.

    Even with wheels only, pip builds the target of a URL: its code would run here.
    """
    for requirement in requirements:
        url = Requirement(requirement.text).url
        if url is not None and not urlsplit(url).path.endswith(".whl"):
            raise _invalid(
                f"{requirement.text!a} is not a wheel, and its build would run code on this host",
                hint="name a wheel (.whl), or use --build if you trust it",
            )


def direct_names(text: str) -> set[str]:
    """Return the names of the requirements in a file that are URLs."""
    requirements = (Requirement(package.text) for package in parse_file(text, "the request"))
    return {canonicalize_name(each.name) for each in requirements if each.url is not None}


def with_kernel(requirements: Sequence[PackageRequirement]) -> list[PackageRequirement]:
    """Return the requirements for the resolver, with those of the kernel."""
    return [*requirements, *parse_words([KERNEL])]


def locked(text: str) -> list[LockFile]:
    """Parse a lock. Raise ValueError if a package has no hash."""
    packages = []
    for _, line in _lines(text):
        pinned = _PINNED.fullmatch(re.sub(r"\s+--hash", " --hash", line))
        if pinned is None or not pinned["hashes"]:
            raise ValueError(line)
        what = pinned["what"]
        name = canonicalize_name(re.split(r"==| @ |\[", what)[0])
        hashes = tuple(option.removeprefix("--hash=") for option in pinned["hashes"].split())
        packages.append(LockFile(name, what, hashes))
    return packages


def lock_text(packages: Iterable[LockFile]) -> str:
    return "".join(
        " \\\n    ".join([package.text, *(f"--hash={value}" for value in package.hashes)]) + "\n"
        for package in sorted(packages, key=lambda package: package.name)
    )


def agreed(
    packages: Iterable[LockFile], requirements: Iterable[PackageRequirement]
) -> list[LockFile]:
    """Remove hashes from the lock that the author did not list. Raise BadRequest
    `hash_mismatch`."""
    hashes_of: dict[str, set[str]] = {}
    for package in requirements:
        if package.hashes:
            hashes_of.setdefault(package.name, set()).update(package.hashes)
    return [_agreed(package, hashes_of.get(package.name)) for package in packages]


def _agreed(package: LockFile, hashes: set[str] | None) -> LockFile:
    if hashes is None:
        return package
    kept = tuple(value for value in package.hashes if value in hashes)
    if not kept:
        raise BadRequest(
            f"{package.text} has none of the requested hashes",
            code="hash_mismatch",
            hint="check that the index offers the file that you expect",
            details={"found": list(package.hashes), "given": sorted(hashes)},
        )
    return LockFile(package.name, package.text, kept)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield logical lines with the number of the first physical one, without comments."""
    pending, start = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        start = start if pending else number
        content = "" if line.lstrip().startswith("#") else line
        if content.endswith("\\"):
            pending += content[:-1] + " "
            continue
        whole = re.sub(r"(^|\s)#.*$", "", pending + content).strip()
        pending = ""
        if whole:
            yield start, whole
    if pending.strip():
        yield start, pending.strip()


def _split(line: str) -> tuple[str, str]:
    options = _OPTIONS.search(line)
    return (line[: options.start()], line[options.start() :]) if options else (line, "")


def _parse_requirement(text: str, options: str, *, where: str) -> PackageRequirement:
    text = text.strip()
    if len(text) > _LINE_MAX or not text.isprintable():
        raise _invalid(f"{where[:300]} is not a requirement")
    if text.startswith("-") or _HASH.sub("", options).strip():
        raise _invalid(
            f"{where} is an option; only names of packages are allowed",
            hint="indexes are configured for pip or uv themselves: pip config, PIP_*, UV_*",
        )
    if "${" in text:
        raise _invalid(f"{where} contains a variable of the environment")
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise _invalid(
            f"{where} is not a requirement: {str(error).splitlines()[0]}",
            hint="for example numpy, 'pandas>=2', or 'tiny @ file:///path/tiny-1.0-py3-none-any.whl'",
        ) from None
    if requirement.url is not None:
        _check_url(requirement.url, where)
    hashes = tuple(f"{kind}:{value}" for kind, value in _HASH.findall(options))
    return PackageRequirement(canonicalize_name(requirement.name), str(requirement), hashes)


def _check_url(url: str, where: str) -> None:
    try:
        parts = urlsplit(url)
        scheme, login = parts.scheme, parts.username or parts.password
    except ValueError:
        scheme, login = "", None
    if scheme not in ("https", "http", "file"):
        raise _invalid(
            f"{where} cannot be locked by a hash",
            hint="name a released version, or a file by https:// or file://",
        )
    if login:
        raise _invalid(
            f"{where} contains a password, and all users can read the lock",
            hint="put it into ~/.netrc, or configure pip's keyring",
        )


def _invalid(message: str, *, hint: str | None = None) -> BadRequest:
    return BadRequest(
        message,
        code="invalid_requirement",
        hint=hint or "one package per argument, for example 'pandas>=2'",
    )
