"""`!cmd`: a shell command inside a cell; its output is shown as it arrives.

The command sees a terminal if the jail has one (programs then write line by line, as in Jupyter).
Its stdin is empty, so that no program waits for a keyboard that does not exist.
"""

import codecs
import contextlib
import os
import select
import signal
import subprocess
import termios
from collections.abc import Callable

_GRACE_S = 0.2


def run(command: str, write: Callable[[str], object]) -> int:
    """Run `command` in $SHELL, else sh. Return its exit code, or minus its fatal signal.

    On KeyboardInterrupt, interrupt the command, then kill its remaining processes, and raise again.
    """
    reading, writing = _terminal_or_pipe()
    shell = os.environ.get("SHELL") or "/bin/sh"
    try:
        child = subprocess.Popen(
            [shell, "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=writing,
            stderr=writing,
            start_new_session=True,  # its children share the group that receives an interrupt
        )
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    try:
        _relay(child, reading, write)
    except BaseException:
        _end(child)
        raise
    finally:
        os.close(reading)
    code = child.wait()
    return 128 - code if code > 128 else code


def _terminal_or_pipe() -> tuple[int, int]:
    try:
        reading, writing = os.openpty()
    except OSError:  # a jail without devpts
        return os.pipe()
    attributes = termios.tcgetattr(writing)
    attributes[1] &= ~termios.OPOST  # no "\r\n": it would end up in the text of the output
    termios.tcsetattr(writing, termios.TCSANOW, attributes)
    return reading, writing


def _relay(child: subprocess.Popen[bytes], reading: int, write: Callable[[str], object]) -> None:
    """Copy until end of file, or until the child has ended: its children may hold the terminal."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    exited = os.pidfd_open(child.pid)
    poll = select.poll()
    poll.register(reading, select.POLLIN)
    poll.register(exited, select.POLLIN)
    try:
        while True:
            ready = dict(poll.poll())
            if reading not in ready:
                break
            try:
                data = os.read(reading, 65536)
            except OSError:  # EIO: the last holder of the terminal closed it
                break
            if not data:
                break
            if text := decoder.decode(data):
                write(text)
        if text := decoder.decode(b"", final=True):
            write(text)
    finally:
        os.close(exited)


def _end(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_S)
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
