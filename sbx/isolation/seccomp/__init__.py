"""The seccomp filters: one table, and the programs prebuilt from it.

    table.py     the refused calls, their errors and the reasons: the file to read and to change
    allowed.py   the operations of ioctl and the like, and the calls, that are allowed by name
    rules.py     the rules that a table consists of
    compiler.py  table → classic BPF, for x86_64 and aarch64 alike, and its listing
    *.bpf          its output, one instruction a line, under the decisions it encodes

`scripts/filters` writes the `.bpf` files again, and tests/meta holds them to the table. They are
built beforehand so that a jail starts without libseccomp, and so that a change of the refused
calls is a diff that a person reads.

    default   for every process of every jail
    strict    loaded in addition once the kernel runs; of two filters the stricter answer counts
    allowlist default, and only the listed calls: in addition for every process of a jail whose
              policy asks for it; strict is loaded after it
    last      in addition to those for the kernel and the commands, after their Landlock domains
    no_unix   in place of last, if the policy allows no Unix sockets
    serve     for the process of a root service that parses HTTP

Our own compiler, not libseccomp's: that one cannot name calls newer than itself for another
architecture, cannot put two conditions on one argument (personality: anything but 0 and ~0), and
gives other bytes in each version. It still is where the numbers of the calls come from.

May import: sbx.linux, sbx.errors.
"""

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from sbx.errors import Broken, CannotEnforce

MACHINES = ("x86_64", "aarch64")
NAMES = ("default", "strict", "serve", "allowlist", "guard", "last", "no_unix")


class Filter(NamedTuple):
    """A program for `sbx.linux.seccomp.install`, and the hash that a receipt shows."""

    name: str
    program: bytes
    sha256: str


class Filters(NamedTuple):
    """The programs of one machine that jails load."""

    default: Filter
    strict: Filter
    allowlist: Filter
    guard: Filter
    last: Filter
    no_unix: Filter


def load_filters(machine: str) -> Filters:
    return Filters(*(load_filter(name, machine) for name in Filters._fields))


def load_filter(name: str, machine: str) -> Filter:
    """Return the filter `name` for a machine, as os.uname names it.

    Raise CannotEnforce for a machine without filters, and Broken for a damaged file: a part of a
    filter allows the rest.
    """
    if machine not in MACHINES:
        raise CannotEnforce(
            f"There is no seccomp filter for {machine}.",
            hint=f"sbx runs on {' and '.join(MACHINES)}.",
            details={"layer": "seccomp", "machine": machine},
        )
    path = file_of(name, machine)
    try:
        text = path.read_text("ascii")
        program = _program(text)
    except (OSError, ValueError) as error:
        raise _damaged(path) from error
    digest = hashlib.sha256(program).hexdigest()
    if f"# sha256 {digest}\n" not in text:
        raise _damaged(path)
    return Filter(name, program, digest)


def file_of(name: str, machine: str) -> Path:
    return Path(__file__).with_name(f"{name}.{machine}.bpf")


def _program(text: str) -> bytes:
    """Parse the instructions: 16 hexadecimal digits at the start of a line are a sock_filter."""
    return b"".join(
        bytes.fromhex(line.split("#", 1)[0]) for line in text.splitlines() if line.strip()
    )


def _damaged(path: Path) -> Broken:
    return Broken(
        f"The seccomp filter {os.fspath(path)} is missing or damaged.", hint="Install sbx again."
    )
