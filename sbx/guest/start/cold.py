"""The first sbx code inside the walls, run by path as `python -I`: PID 1 of the jail.

This is the cold path: a new process for every jail. `sbx.guest.start.fork_child` has the order of a
jail that a zygote forks. Bubblewrap has built the view and loaded the seccomp filter. The following
steps run in this order; nothing that a user could have written is read before step 7.

1. import everything that PID 1 will ever need, from the read-only interpreter and /opt/sbx
2. forbid further imports: from here to the seal, an import raises and ends the jail
3. read the boot frame from the runtime, on the control socket
4. close the inherited descriptors except the two sockets
5. seal PID 1: rlimits, Landlock (the last mount is done, there is one thread). If the workspace is
   a directory of the host, PID 1 becomes the path guard first, and a child continues
6. fork the kernel; it seals itself again: with a nested Landlock domain, so that it can neither
   signal nor trace PID 1 and the commands, and with the policy's second filter
7. in the kernel: allow imports again, enter /workspace, start IPython; in PID 1: send `ready`,
   reap, obey
"""

import sys

sys.path.insert(0, __file__.rpartition("/sbx/guest/")[0])

from sbx.guest.kernel import ending  # the line above sets the path for this import
from sbx.guest.supervisor.pid1 import main

ending.run_to_end(main)
