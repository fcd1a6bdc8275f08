"""Classic BPF as seccomp(2) uses it: write a program, read it, and run it without Linux.

This module builds and tests filters on any machine, also for another architecture. To load a
filter, use `sbx.linux.seccomp.install`. Only the instructions that the filters of sbx use exist
here.

The input of a program is `struct seccomp_data`: the number of the call, the architecture, and six
arguments of 64 bits. `load_argument` loads the low word of an argument, because both supported
architectures are little-endian.
"""

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

ALLOW = 0x7FFF0000
KILL_PROCESS = 0x80000000
NOTIFY = 0x7FC00000  # ask the process that holds the listener (`sbx.linux.seccomp_notify`)
_ERRNO = 0x00050000

_LOAD, _AND, _RETURN, _JUMP = 0x20, 0x54, 0x06, 0x05
_JUMP_IF = {"==": 0x15, ">=": 0x35, "&": 0x45}
_JUMP_SIGN = {code: sign for sign, code in _JUMP_IF.items()}
_FARTHEST = 255  # the most that a conditional jump can skip; an unconditional jump has 32 bits

_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16


class Instruction(NamedTuple):
    """A `struct sock_filter`. Jumps are relative to the next instruction."""

    code: int
    if_true: int
    if_false: int
    value: int


Block = list[Instruction]


def load_number() -> Instruction:
    return Instruction(_LOAD, 0, 0, _NUMBER_AT)


def load_architecture() -> Instruction:
    return Instruction(_LOAD, 0, 0, _ARCHITECTURE_AT)


def load_argument(index: int) -> Instruction:
    return Instruction(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * index)


def mask(bits: int) -> Instruction:
    return Instruction(_AND, 0, 0, bits)


def answer(action: int) -> Instruction:
    return Instruction(_RETURN, 0, 0, action)


def errno_action(number: int) -> int:
    """Return the action that makes a call fail with this errno."""
    return _ERRNO | number


def jump_if(sign: str, value: int, *, true: int = 0, false: int = 0) -> Block:
    """Return a jump that skips `true` or `false` instructions after it. It compares by `==`, `>=`
    or `&`."""
    code = _JUMP_IF[sign]
    if max(true, false) <= _FARTHEST:
        return [Instruction(code, true, false, value)]
    return [
        Instruction(code, 0, 1, value),
        Instruction(_JUMP, 0, 0, true + 1),
        Instruction(_JUMP, 0, 0, false),
    ]


def pack(program: Iterable[Instruction]) -> bytes:
    """Return the array of `struct sock_filter` that Linux loads."""
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


def unpack(program: bytes) -> Block:
    return [Instruction(*fields) for fields in struct.iter_unpack("<HBBI", program)]


def explain(at: int, instruction: Instruction) -> str:
    """Describe one instruction for a reader. A jump names the number of its target."""
    code, if_true, if_false, value = instruction
    if code == _LOAD:
        argument = (value - _ARGUMENTS_AT) // 8
        return "load " + {0: "number", 4: "architecture"}.get(value, f"argument {argument}")
    if code == _AND:
        return f"mask {value:#x}"
    if code == _JUMP:
        return f"go to {at + 1 + value}"
    if code == _RETURN:
        return f"answer {explain_action(value)}"
    target, other = at + 1 + if_true, at + 1 + if_false
    return f"if {_JUMP_SIGN[code]} {value:#x} go to {target}, else {other}"


def explain_action(action: int) -> str:
    names = {ALLOW: "allow", KILL_PROCESS: "kill", NOTIFY: "notify"}
    return names.get(action) or f"errno {action ^ _ERRNO}"


def decide(
    program: Sequence[Instruction], *, architecture: int, number: int, arguments: Sequence[int] = ()
) -> int:
    """Return the action that Linux would take for this call.

    Raise IndexError if the program runs past its last instruction.
    """
    words = (*(argument & 0xFFFFFFFF for argument in arguments), 0, 0, 0, 0, 0, 0)
    at = accumulator = 0
    while True:
        code, if_true, if_false, value = program[at]
        at += 1
        if code == _LOAD:
            data = {_NUMBER_AT: number & 0xFFFFFFFF, _ARCHITECTURE_AT: architecture}
            accumulator = data[value] if value in data else words[(value - _ARGUMENTS_AT) // 8]
        elif code == _AND:
            accumulator &= value
        elif code == _JUMP:
            at += value
        elif code == _RETURN:
            return value
        else:
            at += if_true if _holds(_JUMP_SIGN[code], accumulator, value) else if_false


def _holds(sign: str, accumulator: int, value: int) -> bool:
    if sign == "==":
        return accumulator == value
    return accumulator >= value if sign == ">=" else accumulator & value != 0
