"""The rules of the tables: tests of the arguments of a call, and the action on a match."""

from dataclasses import dataclass


@dataclass(frozen=True)
class HasAny:
    """The argument has at least one of these bits."""

    argument: int
    bits: int


@dataclass(frozen=True)
class HasNone:
    """The argument has none of these bits."""

    argument: int
    bits: int


@dataclass(frozen=True)
class In:
    """The argument, as far as `mask` shows it, is one of these."""

    argument: int
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF


@dataclass(frozen=True)
class NotIn:
    """The argument, as far as `mask` shows it, is none of these."""

    argument: int
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF


@dataclass(frozen=True)
class AtLeast:
    """The argument, taken as unsigned, is this or more."""

    argument: int
    value: int


Test = HasAny | HasNone | In | NotIn | AtLeast


@dataclass(frozen=True)
class Refuse:
    """These calls (names separated by blanks) fail with `errno` when all tests hold."""

    calls: str
    errno: int
    why: str
    when: tuple[Test, ...] = ()


@dataclass(frozen=True)
class Notify:
    """These calls (names separated by blanks) wait for the path guard when all tests hold."""

    calls: str
    why: str
    when: tuple[Test, ...] = ()


@dataclass(frozen=True)
class AllowSyscalls:
    """These calls (names separated by blanks) exist for an allowlist, as far as DEFAULT lets."""

    calls: str
    why: str
