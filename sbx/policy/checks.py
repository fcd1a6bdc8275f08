"""Checks of single values and lists: names, paths, domains, modules.

Each takes a value, returns it in its canonical form and raises what pydantic passes on as one
sentence; outside of pydantic that is a ValueError.
"""

import posixpath
import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from pydantic import AfterValidator, BeforeValidator

from sbx.policy.problems import invalid, shown
from sbx.policy.units import KIB, format_size

MOST_ENTRIES = 1000  # of any list
ENVIRONMENT = "env:"  # an interpreter that is an environment made by `sbx env create`

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_DOMAIN = re.compile(
    r"(\*\.)?([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z]([a-z0-9-]{0,61}[a-z0-9])?"
)
_FILE_TYPE = re.compile(r"[a-z0-9_+-]{1,16}(\.[a-z0-9_+-]{1,16})?")
_MOST_ENV = 64 * KIB  # linux refuses a single string of 128 KiB, and argv needs room too


# --- names ---


def policy_name(value: str) -> str:
    """A name that is one file name, never a path. Raises a ValueError that pydantic understands."""
    if not _NAME.fullmatch(value):
        raise invalid(f"{shown(value)} is not a policy's name: letters, digits, '.', '_' and '-'")
    return value


def env_name(value: str) -> str:
    """A variable a policy or a caller may set. Raises a ValueError that pydantic understands.

    The guest owns what decides whose code is loaded or where it looks *before* the seal, when a
    file that a user wrote must not matter, and what the jail itself decides (HOME, USER).
    PATH may be set: it only finds what is in the view anyway.
    """
    if not _ENV_NAME.fullmatch(value):
        raise invalid(
            f"{shown(value)} is not the name of an environment variable",
            hint="letters, digits and _, with no digit in front",
        )
    if value in _GUESTS_OWN or value.startswith(_GUESTS_OWN_PREFIXES):
        raise invalid(f"{value} is set by sbx itself inside a sandbox", hint=_WHY_RESERVED)
    return value


_GUESTS_OWN_PREFIXES = ("LD_", "PYTHON", "XDG_", "SBX_", "OPENSSL_", "JUPYTER_")
_GUESTS_OWN = frozenset(
    {
        *("HOME", "USER", "LOGNAME", "PWD", "TMPDIR", "IPYTHONDIR", "MPLCONFIGDIR"),
        *("GLIBC_TUNABLES", "GCONV_PATH", "LOCPATH", "NLSPATH", "TZDIR"),
    }
)
_WHY_RESERVED = (
    "LD_*, PYTHON*, XDG_*, OPENSSL_*, SBX_*, HOME, USER and their like decide whose files are "
    "looked at before the sandbox is sealed"
)


def env_value(value: str) -> str:
    if "\0" in value:
        raise invalid("holds a NUL character, which no environment can carry")
    return value


def env(value: Mapping[str, str]) -> Mapping[str, str]:
    size = sum(len(name.encode()) + len(text.encode()) for name, text in value.items())
    if size > _MOST_ENV:
        raise invalid(f"holds {format_size(size)} of text, more than {format_size(_MOST_ENV)}")
    zone = value.get("TZ", "").removeprefix(":")
    if zone.startswith("/") or ".." in zone:
        raise invalid(f"TZ={zone} is a path, and libc would read that file before the seal")
    return MappingProxyType(dict(sorted(value.items())))


def user_name(value: str) -> str:
    if not _USER.fullmatch(value):
        raise invalid(f"{shown(value)} is not a user's name: lower case, up to 32 characters")
    if value in ("root", "nobody"):
        raise invalid(f"{value} is another user's name inside; nobody in a sandbox is {value}")
    return value


def plain_path(value: str) -> str:
    if not value.startswith("/") or not value.isprintable():
        raise invalid(f"{shown(value)} is not an absolute path")
    clean = "/" + posixpath.normpath(value).lstrip("/")
    if value != clean:
        raise invalid(f'{shown(value)} is not a plain path; did you mean "{clean}"?')
    return value


def interpreter(value: str) -> str:
    """The path of a Python, or an environment by its name."""
    if not value.startswith(ENVIRONMENT):
        return plain_path(value)
    if not _NAME.fullmatch(value.removeprefix(ENVIRONMENT)):
        raise invalid(
            f"{shown(value)} names no environment: letters, digits, '.', '_' and '-'",
            hint=f'write "{ENVIRONMENT}NAME"; `sbx env list` shows which there are',
        )
    return value


def environment_name(value: str) -> str:
    """A name that is one file name, never a path. Raises a ValueError that pydantic understands."""
    if not _NAME.fullmatch(value):
        raise invalid(
            f"{shown(value)} is not an environment's name: letters, digits, '.', '_' and '-'"
        )
    return value


def module_name(value: str) -> str:
    if not _MODULE.fullmatch(value):
        raise invalid(f"{shown(value)} is not the name of a module, such as numpy or os.path")
    return value


def domain(value: str) -> str:
    if not _DOMAIN.fullmatch(value) or len(value) > 253:
        raise invalid(
            f"{shown(value)} is not a domain", hint='write "pypi.org" or "*.pypi.org", lower case'
        )
    return value


def file_type(value: str) -> str:
    if not _FILE_TYPE.fullmatch(value):
        raise invalid(
            f"{shown(value)} is not a file type", hint='write "csv": lower case, without the dot'
        )
    return value


# --- paths ---

# Targets that sbx fills itself. Whatever covered one of them, or lay above it, would move a wall.
RESERVED = (
    *("/bin", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/sbin", "/usr"),
    *("/dev", "/proc", "/run", "/sys", "/tmp"),  # noqa: S108  # inside, not the host's
    *("/home", "/opt/sbx", "/sandbox", "/uploads", "/workspace"),
)

# Never shown: /proc and /sys of the host, devices, and sockets (docker.sock is a way out).
_NEVER_SHOWN = ("/proc", "/sys", "/dev", "/run", "/var/run")

# Files of the synthetic /etc, and the two that hold the host's passwords.
_MADE_BY_SBX = (
    *("/etc/passwd", "/etc/group", "/etc/shadow", "/etc/gshadow"),
    *("/etc/hostname", "/etc/hosts", "/etc/nsswitch.conf", "/etc/resolv.conf"),
)

# Read-only system paths are shown at their own place, so they may not cover what sbx makes.
_OWN_PLACES = ("/workspace", "/tmp", "/sandbox", "/uploads", "/opt/sbx")  # noqa: S108


def _below(path: str, above: str) -> bool:
    return path == above or path.startswith(f"{above.rstrip('/')}/")


def overlaps(path: str, others: Iterable[str]) -> str | None:
    return next((other for other in others if _below(path, other) or _below(other, path)), None)


def system_path(value: str) -> str:
    if value == "/etc" or value in _MADE_BY_SBX:
        raise invalid(f"{value} is made by sbx; show another part of /etc, such as /etc/ssl")
    if taken := overlaps(value, (*_NEVER_SHOWN, *_OWN_PLACES)):
        raise invalid(f"{value} cannot be shown: {taken} is sbx's own, or a way out")
    return value


def mount_source(value: str) -> str:
    if value == "/" or any(_below(value, never) for never in _NEVER_SHOWN):
        raise invalid(f"{value} cannot be shown: it holds ways out of a sandbox")
    return value


def mount_target(value: str) -> str:
    if taken := overlaps(value, RESERVED):
        raise invalid(
            f"{value} is taken: {taken} is sbx's own", hint="a free place is /opt/NAME or /srv/NAME"
        )
    return value


# --- lists and numbers ---


def sorted_set(values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(set(values)))


def topmost(values: tuple[str, ...]) -> tuple[str, ...]:
    """A module stands for its submodules: what lies below another entry is dropped."""
    names = set(values)
    return tuple(
        sorted(
            name
            for name in names
            if not any(name[: dot.start()] in names for dot in re.finditer(r"\.", name))
        )
    )


def any_or(
    check: Callable[[str], str], canonical: Callable[[tuple[str, ...]], tuple[str, ...]]
) -> BeforeValidator:
    """A list or the word "any", checked here whole: a union of pydantic's answers a wrong entry
    with one sentence for each of its halves."""

    def validate(value: object) -> object:
        if value == "any":
            return value
        if not isinstance(value, list | tuple) or len(value) > MOST_ENTRIES:
            raise invalid(
                f'must be a list of up to {MOST_ENTRIES} entries or "any", not {shown(value)}'
            )
        if wrong := [entry for entry in value if not isinstance(entry, str)]:
            raise invalid(f"must be a list of texts, and {shown(wrong[0])} is none")
        return canonical(tuple(check(entry) for entry in value))

    return BeforeValidator(validate)


def at_least(least: int, reason: str) -> AfterValidator:
    def check(value: int) -> int:
        if value < least:
            raise invalid(f"must be at least {format_size(least)}: {reason}")
        return value

    return AfterValidator(check)
