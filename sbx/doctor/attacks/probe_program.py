"""The program that tries attacks and reports the outcome of each.

It is sent as a cell, and the tests also run it outside of every wall. Its parameters are literals
in front of it. A child process tries the attacks. An attack that may change or end its process has
a separate child. If a policy allows no processes, the program tries the attacks in its own process,
except those that would end it, which have no outcome then. It evades the import rules of such a
policy by `exec`, as an attacker would: they are not a wall. It prints one line for each outcome, so
that an early end loses only the outcomes after it.
"""

import json
import platform
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sbx.doctor.attacks.attack import Attack, Class
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
                    if number not in KNOWN["fatal"]:
                        report(number, try_here(code))
            group = rest
    gc.unfreeze()
    gc.enable()

main()
'''


# The acts that the attacks use, each where it is allowed. If one fails, nothing is proved by an
# attack that uses it. An attack that only looks ("held_if") needs its sources.
_SOCKET = "socket.socket(type=socket.SOCK_DGRAM)"
_LISTEN = """
server = socket.socket()
server.bind(("127.0.0.1", 0))
server.listen()
"""
_PAIR = "socket.socketpair()"
CONTROLS: Mapping[str, str] = {
    "call(": "os.close(call('eventfd2', 0, 0))",
    "read(": "held_if(read(own('control')) != b'x')",
    "open(": "open('/proc/self/status').close()",
    "opens(": "opens(own('control'), os.O_RDWR)",
    "plant(": "plant(f'{WORK}/attack-control')",
    "os.open(": "os.close(os.open(own('control'), os.O_RDWR))",
    "os.listdir(": "held_if('1' not in os.listdir('/proc'))",
    "glob.glob(": "held_if(glob.glob('/proc/1') == [])",
    "os.stat(": "os.stat(WORK)",
    "os.statvfs(": "os.statvfs(WORK)",
    "os.readlink(": "os.readlink('/proc/self/ns/user')",
    "os.mkdir(": "os.mkdir(path := f'{WORK}/attack-control'); os.rmdir(path)",
    "os.rename(": "os.rename(path := own('control'), path + '2'); os.unlink(path + '2')",
    "os.unlink(": "os.unlink(own('control'))",
    "os.link(": "os.link(path := own('control'), path + '2'); os.unlink(path + '2')",
    "os.symlink(": "os.symlink('x', path := f'{WORK}/attack-control'); os.unlink(path)",
    "os.mkfifo(": "os.mkfifo(path := f'{WORK}/attack-control'); os.unlink(path)",
    "os.mknod(": "os.mknod(path := f'{WORK}/attack-control'); os.unlink(path)",
    "libc.creat(": "os.close(result_of(libc.creat(own('control').encode(), 0o600), 'creat'))",
    "os.chmod(": "os.chmod(own('control'), 0o700)",
    "os.fchmod(": "os.fchmod(os.open(own('control'), os.O_RDWR), 0o700)",
    "os.chown(": "os.chown(own('control'), -1, os.getgid())",
    "os.utime(": "os.utime(own('control'))",
    "os.truncate(": "os.truncate(own('control'), 0)",
    "os.ftruncate(": "os.ftruncate(os.open(own('control'), os.O_RDWR), 4096)",
    "os.posix_fallocate(": "os.posix_fallocate(os.open(own('control'), os.O_RDWR), 0, 4096)",
    "os.setxattr(": "os.setxattr(own('control'), 'user.control', b'')",
    "libc.mmap(": "libc.mmap(None, ctypes.c_size_t(4096), 3, 0x22, -1, ctypes.c_long(0))",
    "mmap.mmap(": "mmap.mmap(-1, 4096).close()",
    "libc.mlock(": "held_if(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] < 0)",
    "libc.inotify_init1(": "os.close(result_of(libc.inotify_init1(0), 'inotify_init1'))",
    "os.dup(": "os.close(os.dup(0))",
    "os.pipe(": "list(map(os.close, os.pipe()))",
    "fcntl.fcntl(": "fcntl.fcntl(0, fcntl.F_GETFD)",
    "fcntl.ioctl(": "fcntl.ioctl(os.pipe()[0], 0x541B, bytes(4))",
    "os.openpty(": "list(map(os.close, os.openpty()))",
    "os.fork(": "os.waitpid(os.fork() or os._exit(0), 0)",
    "threading.Thread(": "threading.Thread(target=int).start()",
    "os.kill(": "os.kill(os.getpid(), 0)",
    "os.pidfd_open(": "os.close(os.pidfd_open(os.getpid()))",
    "bait(": "read(f'/proc/{os.getpid()}/environ')",
    "status(": "held_if(status('Pid') is None)",
    "os.setpriority(": "os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(0, 0))",
    "os.sched_setaffinity(": "os.sched_setaffinity(0, os.sched_getaffinity(0))",
    "resource.prlimit(": "resource.prlimit(0, resource.RLIMIT_CORE)",
    "resource.getrlimit(": "resource.getrlimit(resource.RLIMIT_CORE)",
    "resource.setrlimit(": "resource.setrlimit(7, resource.getrlimit(7))",
    "os.setuid(": "os.setuid(os.getuid())",
    "os.setgid(": "os.setgid(os.getgid())",
    "os.setresuid(": "os.setresuid(-1, -1, -1)",
    "os.setgroups(": "os.getgroups()",
    "libc.prctl(": "result_of(libc.prctl(3, 0, 0, 0, 0), 'prctl')",
    "os.uname(": "os.uname()",
    "socket.socket(": "socket.socket().close()",
    "sock.setsockopt(": _SOCKET + ".setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)",
    "sock.bind(": _SOCKET + ".bind(('127.0.0.1', 0))",
    "sock.connect(": _SOCKET + ".connect(('127.0.0.1', 9))",
    "connect(": _LISTEN + "connect(socket.AF_INET, server.getsockname())",
    "sock.send(": f"pair = {_PAIR}; pair[0].send(b'x')",
    "socket.send_fds(": f"pair = {_PAIR}; socket.send_fds(pair[0], [b'x'], [0])",
    ".sendto(": _LISTEN + f"{_SOCKET}.sendto(b'x', server.getsockname())",
    "socket.if_nameindex(": "held_if(socket.if_nameindex() == [])",
}
REFUSED_BY_STRICT = (
    *("a command", "os.symlink(", "os.link(", "os.mkfifo(", "os.fork(", "os.pidfd_open("),
    *("socket.socket(", "socket.if_nameindex(", "connect(", "sock.connect(", "sock.bind("),
    *("sock.setsockopt(", ".sendto("),
)


def controls_of(attack: Attack) -> list[str]:
    """Return the names of the controls of an attack: its acts, or the means that it plants by."""
    if attack.kind is Class.HOST_EXECUTABLES:
        return [control_name(attack.act[0])]
    acts = [act for act in dict.fromkeys(re.findall(r"[\w.]+\(", attack.code)) if act in CONTROLS]
    return [control_name(act) for act in (*acts, *attack.act[:1])]


def control_name(act: str) -> str:
    return f"control of {act}"


def is_fatal(attack: Attack) -> bool:
    """Return whether the wall ends the process that tries the attack."""
    return "SIGSYS" in attack.expected


def program(attacks: Sequence[Attack], host: Mapping[str, Any], limits: Mapping[str, int]) -> str:
    """Return a program that tries `attacks`. Their numbers are their positions."""
    parameters = {
        "host": host,
        "limits": limits,
        "numbers": numbers_of(platform.machine()),
        "attacks": [[number, attack.code, attack.lone] for number, attack in enumerate(attacks)],
        "fatal": [number for number, attack in enumerate(attacks) if is_fatal(attack)],
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
