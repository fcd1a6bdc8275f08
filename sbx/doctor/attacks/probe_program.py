"""The program that tries attacks and says what became of each.

It is sent as a cell, and the tests run it outside of every wall too. What it needs to know comes as
literals in front of it. Attacks are tried in a child, and alone in one those that change or end who
tries them. Under a policy without processes there is no child to be had: those that need one are
held by that, and the others are tried where it stands. The import rules of such a policy are evaded
by `exec`, as an attacker would: they are no wall. Each outcome is a line of its own, so that those
are known that came before an end.
"""

import json
import platform
from collections.abc import Mapping, Sequence
from typing import Any

from sbx.doctor.attacks.attack import Attack
from sbx.doctor.attacks.syscall_numbers import numbers_of

MARK = "\x1e"  # before each outcome, so that no other line is taken for one
_MOST_OF_A_WORD = 60

_PROGRAM = r'''
import os, sys
import array, ctypes, errno, fcntl, gc, glob, json, mmap, resource, signal
import socket, stat, struct, threading, time

class Held(Exception):
    """The code looked, and found the wall it attacks."""

class Absent(Exception):
    """This linux, or this host, has nothing to attack."""

def told(text):
    return json.loads(text)

KNOWN = told(KNOWN)
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
    "Make a file where there must be no writing, and take it away again."
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    os.unlink(path)

def own(name, text=b"x"):
    "A new file of the own, somewhere that may be written."
    path = f"{WORK}/attack-{os.getpid()}-{name}"
    with open(path, "wb") as file:
        file.write(text)
    return path

def bait():
    "The pid of the host's bait; unless that number is somebody else here."
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
    "The directory of the host that is mounted, where it could be."
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

def tell(number, outcome):
    print(f"\n\x1e{json.dumps([number, outcome])}", flush=True)

def try_in_child(attacks):
    "Try them in one child and tell what became of each; those that its end left untried, or None."
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
    with os.fdopen(reading, "rb") as told:
        words = told.read(1 << 16).decode().split()
    ended = os.waitpid(child, 0)[1]
    if len(words) < len(attacks):
        killed = os.WIFSIGNALED(ended)
        words.append(signal.Signals(os.WTERMSIG(ended)).name if killed else "silent")
    for (number, code, lone), word in zip(attacks, words):
        tell(number, word)
    return attacks[len(words):]

def groups(attacks):
    "One for each that must be alone, and one for all those between two of these."
    found = []
    for attack in attacks:
        if attack[2] or not found or found[-1][0][2]:
            found.append([])
        found[-1].append(attack)
    return found

def main():
    gc.disable()  # else each child copies, page by page, what it looks at and never changes
    gc.freeze()
    for group in groups(ATTACKS):
        while group:
            left = try_in_child(group)
            if left is None:
                for number, code, lone in group:
                    tell(number, "EPERM" if lone else try_here(code))
            group = left
    gc.unfreeze()
    gc.enable()

main()
'''


def program(attacks: Sequence[Attack], host: Mapping[str, Any], limits: Mapping[str, int]) -> str:
    """The text that tries `attacks`, which are told apart by where they stand."""
    known = {
        "host": host,
        "limits": limits,
        "numbers": numbers_of(platform.machine()),
        "attacks": [[number, one.code, one.lone] for number, one in enumerate(attacks)],
    }
    words = {"KNOWN": json.dumps(known), "__name__": "attacks"}
    return f"exec({_PROGRAM!r}, {words!r})"


def outcomes(attacks: Sequence[Attack], printed: str) -> dict[str, str]:
    """By the names of the attacks. What came over the wall is hostile: a line that is not as ours
    would print it is none, and an attack that nothing was said of is left out."""
    found: dict[str, str] = {}
    for line in printed.split("\n"):
        if not line.startswith(MARK):
            continue
        try:
            told = json.loads(line[1:])
        except (ValueError, RecursionError):
            continue
        match told:
            case [int() as number, str() as outcome] if 0 <= number < len(attacks):
                found[attacks[number].name] = outcome[:_MOST_OF_A_WORD]
    return found
