"""The program that tries attacks and reports the outcome of each.

It is sent as a cell, and the tests also run it outside of every wall. Its parameters are literals
in front of it. A child process tries the attacks. An attack that may change or end its process has
a separate child. If a policy allows no processes, it stops the attacks that need a child, and the
program tries the others in its own process. It evades the import rules of such a policy by `exec`,
as an attacker would: they are not a wall. It prints one line for each outcome, so that an early end
loses only the outcomes after it.
"""

import json
import platform
from collections.abc import Mapping, Sequence
from typing import Any

from sbx.doctor.attacks.attack import Attack
from sbx.doctor.attacks.syscall_numbers import numbers_of

MARK = "\x1e"  # before each outcome, which no other line starts with
_MOST_OF_A_WORD = 60

_PROGRAM = r'''
import os, sys
import array, ctypes, errno, fcntl, gc, glob, json, mmap, resource, signal
import socket, stat, struct, threading, time

class Held(Exception):
    """The code looked, and found the wall it attacks."""

class Absent(Exception):
    """This Linux, or this host, has nothing to attack."""

KNOWN = json.loads(KNOWN)
HOST, LIMITS, NUMBERS, ATTACKS = (KNOWN[k] for k in ("host", "limits", "numbers", "attacks"))
WORK = HOST["work"]
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
libc.mmap.restype = ctypes.c_void_p

def result_of(answer, name):
    if answer == -1:
        number = ctypes.get_errno()
        raise OSError(number, name)
    return answer

def call(name, *args):
    number = NUMBERS.get(name, name)
    if number is None:
        raise Absent
    words = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    return result_of(libc.syscall(ctypes.c_long(number), *words), str(name))

def held_if(condition):
    if condition:
        raise Held

def read(path):
    with open(path, "rb") as file:
        return file.read(4096)

def opens(path, flags=os.O_RDONLY):
    os.close(os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY))

def plant(path):
    "Create a file where writing is forbidden, and remove it again."
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    os.unlink(path)

def own(name, text=b"x"):
    "Create a file in the workspace, and return its path."
    path = f"{WORK}/attack-{os.getpid()}-{name}"
    with open(path, "wb") as file:
        file.write(text)
    return path

def bait():
    "Return the pid of the decoy, unless another process has that number here."
    try:
        mine = HOST["token"].encode() in read(f"/proc/{HOST['pid']}/environ")
    except FileNotFoundError:
        mine = True
    except OSError:
        mine = not 0 < HOST["pid"] <= max(int(n) for n in os.listdir("/proc") if n.isdigit())
    held_if(not mine)
    return HOST["pid"]

def connect(family, address, kind=socket.SOCK_STREAM):
    with socket.socket(family, kind) as sock:
        sock.settimeout(1)
        sock.connect(address)

def mounted():
    "Require the mounted directory of the host."
    if not os.path.isdir(HOST["shown"]):
        raise Absent

def has_mode(path, bits):
    try:
        return bool(os.lstat(path).st_mode & bits)
    finally:
        os.unlink(path)

def status(field):
    for line in open("/proc/thread-self/status"):
        name, _, value = line.partition(":")
        if name == field:
            return value.strip()
    raise Absent

def try_here(code):
    try:
        exec(compile(code, "attack", "exec"), globals())
        return "ok"
    except Held:
        return "held"
    except Absent:
        return "absent"
    except OSError as error:
        return errno.errorcode.get(error.errno, type(error).__name__)
    except BaseException as error:
        return type(error).__name__

def report(number, outcome):
    print(f"\n\x1e{json.dumps([number, outcome])}", flush=True)

def try_in_child(attacks):
    "Try the attacks in one child. Return those after its end, or None without a child."
    try:
        reading, writing = os.pipe()
        child = os.fork()
    except OSError:
        return None
    if not child:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            os.close(reading)
            for number, code, lone in attacks:
                signal.alarm(10)
                os.write(writing, f"{try_here(code)}\n".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        words = pipe.read(1 << 16).decode().split()
    ended = os.waitpid(child, 0)[1]
    if len(words) < len(attacks):
        killed = os.WIFSIGNALED(ended)
        words.append(signal.Signals(os.WTERMSIG(ended)).name if killed else "silent")
    for (number, code, lone), word in zip(attacks, words):
        report(number, word)
    return attacks[len(words):]

def groups(attacks):
    "Return a group for each lone attack, and one for all attacks between two of them."
    result = []
    for attack in attacks:
        if attack[2] or not result or result[-1][0][2]:
            result.append([])
        result[-1].append(attack)
    return result

def main():
    gc.disable()  # the collector would make each child copy the pages of all objects
    gc.freeze()
    for group in groups(ATTACKS):
        while group:
            rest = try_in_child(group)
            if rest is None:
                for number, code, lone in group:
                    report(number, "EPERM" if lone else try_here(code))
            group = rest
    gc.unfreeze()
    gc.enable()

main()
'''


def program(attacks: Sequence[Attack], host: Mapping[str, Any], limits: Mapping[str, int]) -> str:
    """Return a program that tries `attacks`. Their numbers are their positions."""
    parameters = {
        "host": host,
        "limits": limits,
        "numbers": numbers_of(platform.machine()),
        "attacks": [[number, attack.code, attack.lone] for number, attack in enumerate(attacks)],
    }
    words = {"KNOWN": json.dumps(parameters), "__name__": "attacks"}
    return f"exec({_PROGRAM!r}, {words!r})"


def outcomes(attacks: Sequence[Attack], printed: str) -> dict[str, str]:
    """Return the outcomes by the names of the attacks.

    The output is hostile: skip each line that the program would not print.
    """
    results: dict[str, str] = {}
    for line in printed.split("\n"):
        if not line.startswith(MARK):
            continue
        try:
            entry = json.loads(line[1:])
        except (ValueError, RecursionError):
            continue
        match entry:
            case [int() as number, str() as outcome] if 0 <= number < len(attacks):
                results[attacks[number].name] = outcome[:_MOST_OF_A_WORD]
    return results
