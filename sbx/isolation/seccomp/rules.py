"""The rules of the tables: tests of the arguments of a call, and the action on a match."""

from msgspec import Struct


class HasAny(Struct, frozen=True):
    """The argument has at least one of these bits."""

    argument: int
    bits: int


class HasNone(Struct, frozen=True):
    """The argument has none of these bits."""

    argument: int
    bits: int


class In(Struct, frozen=True):
    """The argument, as far as `mask` shows it, is one of these."""

    argument: int
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF


class NotIn(Struct, frozen=True):
    """The argument, as far as `mask` shows it, is none of these."""

    argument: int
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF


class AtLeast(Struct, frozen=True):
    """The argument, taken as unsigned, is this or more."""

    argument: int
    value: int


Test = HasAny | HasNone | In | NotIn | AtLeast


class Refuse(Struct, frozen=True):
    """These calls (names separated by blanks) fail with `errno` when all tests hold."""

    calls: str
    errno: int
    why: str
    when: tuple[Test, ...] = ()


class Notify(Struct, frozen=True):
    """These calls (names separated by blanks) wait for the path guard when all tests hold."""

    calls: str
    why: str
    when: tuple[Test, ...] = ()


class AllowSyscalls(Struct, frozen=True):
    """These calls (names separated by blanks) exist for an allowlist, as far as DEFAULT lets."""

    calls: str
    why: str
