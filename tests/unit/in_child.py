"""Do in a child of the test what no process can undo."""

import errno
import os
from collections.abc import Callable

from sbx.guest.start import lockdown


def in_child(act: Callable[[int], object]) -> str:
    """Return the text of the result of `act`, or the name of the wall that it could not put up.

    `act` gets the descriptor by which the outcome is reported.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            try:
                outcome = str(act(writing))
            except lockdown.SealError as error:
                outcome = f"{error.layer}: {errno.errorcode.get(error.errno or 0)}"
            except BaseException as error:  # noqa: BLE001  # a fork never returns into pytest
                outcome = repr(error)
            os.write(writing, outcome.encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as answer:
        outcome = answer.read()
    os.waitpid(pid, 0)
    return outcome


def exit_status(act: Callable[[], object]) -> int:
    """Return the status with which `act` ends a child of the test; -1 if it returns or raises."""
    returned = 0x7F
    pid = os.fork()
    if pid == 0:
        try:
            act()
        finally:
            os._exit(returned)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return -1 if status == returned else status
