"""Checks of single values and lists: names, paths, hosts, modules.

Each check returns the value in its canonical form, or raises an error that pydantic reports as one
sentence. Outside of pydantic this error is a ValueError.
"""

import ipaddress
import posixpath
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from pydantic import AfterValidator, BeforeValidator

from sbx.policy import destinations
from sbx.policy.problems import invalid, shown
from sbx.policy.units import KIB, format_size

MOST_ENTRIES = 1000  # of any list
ENVIRONMENT = "env:"  # prefix of an interpreter that names an environment of `sbx env create`

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_METHOD = re.compile(r"[A-Z]{1,20}")
_PATH_PATTERN = re.compile(r"/[!-)+-~]*\*?")
_HEADER = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")
_PACKAGE = re.compile(r"(?=.{1,60}\Z)[a-z0-9]+(-[a-z0-9]+)*")
_SECRET_SOURCE = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]{0,127}|file:/[ -~]+")
_FILE_TYPE = re.compile(r"[a-z0-9_+-]{1,16}(\.[a-z0-9_+-]{1,16})?")
_MOST_SECRETS = 100
_MOST_ENV = 64 * KIB  # Linux refuses a single string of 128 KiB, and argv needs room too


# --- names ---


def policy_name(value: str) -> str:
    """Check a name that is one file name, never a path. Raise a ValueError that pydantic
    accepts."""
    if not _NAME.fullmatch(value):
        raise invalid(f"{shown(value)} is not a policy's name: letters, digits, '.', '_' and '-'")
    return value


def env_name(value: str) -> str:
    """Check a variable that a policy or a caller may set. Raise a ValueError that pydantic accepts.

    The guest reserves two kinds of variables. Some control which code is loaded, or from where,
    *before* the lockdown, when a file that a user wrote must have no effect. The jail itself
    decides others (HOME, USER). PATH may be set, because it only finds programs that are visible
    anyway.
    """
    if not _ENV_NAME.fullmatch(value):
        raise invalid(
            f"{shown(value)} is not the name of an environment variable",
            hint="use letters, digits and _; the first character is not a digit",
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
    "LD_*, PYTHON*, XDG_*, OPENSSL_*, SBX_*, HOME, USER and similar variables control which files "
    "are read before the lockdown of the sandbox"
)


def env_value(value: str) -> str:
    if "\0" in value:
        raise invalid("contains a NUL character, which an environment cannot hold")
    return value


def env(value: Mapping[str, str]) -> Mapping[str, str]:
    size = sum(len(name.encode()) + len(text.encode()) for name, text in value.items())
    if size > _MOST_ENV:
        raise invalid(f"contains {format_size(size)} of text, more than {format_size(_MOST_ENV)}")
    zone = value.get("TZ", "").removeprefix(":")
    if zone.startswith("/") or ".." in zone:
        raise invalid(f"TZ={zone} is a path, and libc would read that file before the lockdown")
    return MappingProxyType(dict(sorted(value.items())))


def user_name(value: str) -> str:
    if not _USER.fullmatch(value):
        raise invalid(f"{shown(value)} is not a user's name: lower case, up to 32 characters")
    if value in ("root", "nobody"):
        raise invalid(
            f"{value} is the name of another user inside; the user of a sandbox is never {value}"
        )
    return value


def plain_path(value: str) -> str:
    if not value.startswith("/") or not value.isprintable():
        raise invalid(f"{shown(value)} is not an absolute path")
    clean = "/" + posixpath.normpath(value).lstrip("/")
    if value != clean:
        raise invalid(f'{shown(value)} is not a plain path; did you mean "{clean}"?')
    return value


def interpreter(value: str) -> str:
    """Check an interpreter: the path of a Python, or the name of an environment."""
    if not value.startswith(ENVIRONMENT):
        return plain_path(value)
    if not _NAME.fullmatch(value.removeprefix(ENVIRONMENT)):
        raise invalid(
            f"{shown(value)} does not name an environment: use letters, digits, '.', '_' and '-'",
            hint=f'write "{ENVIRONMENT}NAME"; `sbx env list` shows the environments',
        )
    return value


def environment_name(value: str) -> str:
    """Check a name that is one file name, never a path. Raise a ValueError that pydantic
    accepts."""
    if not _NAME.fullmatch(value):
        raise invalid(
            f"{shown(value)} is not an environment's name: letters, digits, '.', '_' and '-'"
        )
    return value


def module_name(value: str) -> str:
    if not _MODULE.fullmatch(value):
        raise invalid(f"{shown(value)} is not the name of a module, such as numpy or os.path")
    return value


def file_type(value: str) -> str:
    if not _FILE_TYPE.fullmatch(value):
        raise invalid(
            f"{shown(value)} is not a file type", hint='write "csv": lower case, without the dot'
        )
    return value


# --- the network ---


def destination(value: str) -> str:
    """Check a host that code inside may reach, with or without a port."""
    try:
        return str(destinations.parse(value))
    except ValueError:
        raise invalid(f"{shown(value)} is not a host to reach", hint=_how_to_name(value)) from None


def _how_to_name(value: str) -> str:
    """Return a hint for the most likely mistake in an invalid host."""
    host = value.partition(":")[0]
    labels = host.removeprefix("*.").split(".")
    if "/" not in value and "*" in host.removeprefix("*.") and host != "*":
        return 'a wildcard is allowed only at the beginning: "*.example.org", all names below it'
    if "/" not in value and "*" in host and len(labels) < 2:
        return 'a wildcard needs a domain of at least two parts after it, such as "*.example.org"'
    if value != value.lower() and "/" not in value:
        return f"write it in lower case: {shown(value.lower())}"
    with suppress(ValueError):
        ipaddress.ip_network(value, strict=False)
        return "name single addresses; only allow_private accepts a network"
    return (
        'write "example.org", "*.example.org" or "example.org:8443", in lower case and '
        "without http://"
    )


def host_pattern(value: str) -> str:
    """Check a host without a port: a name, all names below a domain, or an address."""
    if not destinations.is_name(value) and not destinations.is_address(value):
        raise invalid(
            f"{shown(value)} is not a host",
            hint='write "example.org" or "*.example.org": lower case, no port, no http://',
        )
    return value


def private_host(value: str) -> str:
    """Check a host, or a network of addresses, that may be private."""
    try:
        network = ipaddress.ip_network(value, strict=True)
    except ValueError:
        return host_pattern(value)
    plain = str(network.network_address) if network.num_addresses == 1 else str(network)
    if value not in (plain, str(network)):
        raise invalid(f'{shown(value)} is not in canonical form; did you mean "{plain}"?')
    return plain


def method(value: str) -> str:
    if not _METHOD.fullmatch(value) or value == "CONNECT":
        raise invalid(f"{shown(value)} is not an HTTP method", hint='write "GET", in upper case')
    return value


def path_pattern(value: str) -> str:
    if not _PATH_PATTERN.fullmatch(value) or len(value) > 2000:
        raise invalid(
            f"{shown(value)} is not a URL path",
            hint='write "/v1/users", or "/v1/*" for all paths with this prefix; * only at the end',
        )
    if (
        "?" in value
        or "#" in value
        or "%" in value
        or posixpath.normpath(value)
        not in (
            value,
            value.rstrip("/"),
        )
    ):
        raise invalid(
            f"{shown(value)} is not a plain path",
            hint="no query, no fragment, no escapes, no . or .. and no //",
        )
    return value


def header(value: str) -> str:
    if not _HEADER.fullmatch(value):
        raise invalid(f"{shown(value)} is not the name of a header, such as Authorization")
    if value.lower() in _NO_SECRETS_HEADER:
        raise invalid(
            f"{value} controls the destination or the framing of a request: it cannot hold a secret"
        )
    return value


_NO_SECRETS_HEADER = frozenset(
    {
        *("connection", "content-length", "host", "keep-alive", "proxy-authorization"),
        *("proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"),
    }
)


def package_name(value: str) -> str:
    """Check the canonical name of a package."""
    if not _PACKAGE.fullmatch(value):
        raise invalid(f"{shown(value)} is not a package's name: a-z, 0-9, and single - between")
    return value


def secret_name(value: str) -> str:
    if not _ENV_NAME.fullmatch(value):
        raise invalid(f"{shown(value)} is not a secret's name: letters, digits and _")
    return value


def secret_source(value: str) -> str:
    """Check the location of a secret on the host. The policy never contains the secret itself."""
    if not _SECRET_SOURCE.fullmatch(value):
        raise invalid(
            "is not the location of a secret",  # do not print it: it may be the secret itself
            hint='write "env:NAME", a variable of the runtime, or "file:/path"; the value itself '
            "never belongs in a policy",
        )
    if value.startswith("file:"):
        try:
            plain_path(value.removeprefix("file:"))
        except ValueError:
            raise invalid("is not a plain absolute path after file:") from None
    return value


def secrets(value: Mapping[str, Any]) -> Mapping[str, Any]:
    if len(value) > _MOST_SECRETS:
        raise invalid(f"contains more than {_MOST_SECRETS} secrets")
    variables = [secret.env for secret in value.values()]
    if twice := [name for name in variables if variables.count(name) > 1]:
        raise invalid(f"two secrets would set the same variable {twice[0]}")
    return MappingProxyType(dict(sorted(value.items())))


# --- paths ---

# Targets that sbx fills itself. A mount over or above one of them would weaken a restriction.
RESERVED = (
    *("/bin", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/sbin", "/usr"),
    *("/dev", "/proc", "/run", "/sys", "/tmp"),  # noqa: S108  # inside, not the host's
    *("/home", "/mnt", "/opt/sbx", "/sandbox", "/uploads", "/workspace"),
)

# Never shown: /proc and /sys of the host, devices, and sockets (docker.sock allows an escape).
_NEVER_SHOWN = ("/proc", "/sys", "/dev", "/run", "/var/run")

# Files of the synthetic /etc, and the two files with the host's passwords.
_MADE_BY_SBX = (
    *("/etc/passwd", "/etc/group", "/etc/shadow", "/etc/gshadow"),
    *("/etc/hostname", "/etc/hosts", "/etc/nsswitch.conf", "/etc/resolv.conf"),
)

# Read-only system paths are shown at their own place, so they may not cover the paths of sbx.
_OWN_PLACES = ("/workspace", "/tmp", "/sandbox", "/uploads", "/opt/sbx")  # noqa: S108


def _below(path: str, above: str) -> bool:
    return path == above or path.startswith(f"{above.rstrip('/')}/")


def overlaps(path: str, others: Iterable[str]) -> str | None:
    return next((other for other in others if _below(path, other) or _below(other, path)), None)


def system_path(value: str) -> str:
    if value == "/etc" or value in _MADE_BY_SBX:
        raise invalid(f"{value} is created by sbx; show another part of /etc, such as /etc/ssl")
    if taken := overlaps(value, (*_NEVER_SHOWN, *_OWN_PLACES)):
        raise invalid(f"{value} cannot be shown: {taken} is reserved for sbx, or allows an escape")
    return value


def mount_source(value: str) -> str:
    if value == "/" or any(_below(value, never) for never in _NEVER_SHOWN):
        raise invalid(f"{value} cannot be shown: it contains files that allow an escape")
    return value


def is_within(path: str, directories: Iterable[str]) -> bool:
    """Return whether a plain path is one of these directories, or lies below one."""
    return any(_below(path, directory) for directory in directories)


def mount_target(value: str) -> str:
    if taken := overlaps(value, RESERVED):
        raise invalid(
            f"{value} is taken: {taken} is reserved for sbx", hint="use /opt/NAME or /srv/NAME"
        )
    return value


# --- lists and numbers ---


def sorted_set(values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(set(values)))


def topmost(values: tuple[str, ...]) -> tuple[str, ...]:
    """Drop every module below another entry, because a module includes its submodules."""
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
    """Validate a list or the word "any", as a whole.

    A union of pydantic would report a wrong entry with one sentence for each of its alternatives.
    """

    def validate(value: object) -> object:
        if value == "any":
            return value
        if not isinstance(value, list | tuple) or len(value) > MOST_ENTRIES:
            raise invalid(
                f'must be a list of up to {MOST_ENTRIES} entries or "any", not {shown(value)}'
            )
        if wrong := [entry for entry in value if not isinstance(entry, str)]:
            raise invalid(f"must be a list of strings, and {shown(wrong[0])} is not a string")
        return canonical(tuple(check(entry) for entry in value))

    return BeforeValidator(validate)


def at_least(least: int, reason: str) -> AfterValidator:
    def check(value: int) -> int:
        if value < least:
            raise invalid(f"must be at least {format_size(least)}: {reason}")
        return value

    return AfterValidator(check)
