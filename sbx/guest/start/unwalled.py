"""The guest of a session without walls, run by path as `python -P`: only the policy `host` has it.

No step here restricts anything: the code has all rights of the user who runs sbx. A jail starts
`cold` or `zygote` instead, and no frame turns one entry point into another. The two arguments are
the numbers of the control socket and of the kernel's socket.

1. import everything that the supervisor will ever need
2. read the boot frame, and close the inherited descriptors except the two sockets
3. fork the kernel, in its own session; it starts IPython in the working directory
4. send `ready`, reap, obey. No PID namespace ends with this process, so it ends process groups:
   that of a command with the command, and all of them when the runtime hangs up
"""

import os
import socket
import sys
from typing import Any, NoReturn

sys.path.insert(0, __file__.rpartition("/sbx/guest/")[0])

from sbx.guest import frames
from sbx.guest.kernel import ending
from sbx.guest.start import lockdown
from sbx.guest.supervisor import children, pid1

_NO_WALLS: dict[str, Any] = {"landlock": False, "last_filter": None}


def main(control_fd: int, kernel_fd: int) -> NoReturn:
    control = socket.socket(fileno=control_fd)
    kernel_sock = socket.socket(fileno=kernel_fd)
    boot = frames.receive(control)
    if boot is None:
        os._exit(0)
    lockdown.close_all_but((control_fd, kernel_fd))
    oom = children.OomScore()
    supervisor = os.getpid()
    kernel_pid = os.fork()
    if kernel_pid == 0:
        oom.close()
        control.close()
        os.setsid()
        children.end_with(supervisor)
        pid1.become_kernel(kernel_sock, boot.content)
    kernel_sock.close()
    serving = pid1.Supervisor(control, kernel_pid, _NO_WALLS, oom, ends_groups=True)
    serving.tell("ready", {"landlock": 0})
    serving.run()


ending.run_to_end(lambda: main(*map(int, sys.argv[1:])))
