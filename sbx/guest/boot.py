"""The first code of ours inside the walls, run by path as `python -I`: PID 1 of the jail.

This is the cold path: a process of its own for every jail. `sbx.guest.forked` tells the order of a
jail that a zygote forks. Bubblewrap has built the view and loaded the seccomp filter. What follows,
in this order; nothing a user could have written is looked at before step 7.

1. import everything that PID 1 will ever need, from the read-only interpreter and /opt/sbx
2. forbid further imports: from here to the seal one raises, and ends the jail
3. read the boot frame from the runtime, on the control socket
4. close what is inherited beside the two sockets
5. seal PID 1: rlimits, Landlock (the last mount is long made, there is one thread). Where the
   workspace is a directory of the host, PID 1 becomes the path guard first, and a child goes on
6. fork the kernel; it seals itself once more: a Landlock domain of its own, so that it can neither
   signal nor trace PID 1 and the commands, and the policy's second filter
7. in the kernel: allow imports again, enter /workspace, start IPython; in PID 1: say `ready`,
   reap, obey
"""

import sys

sys.path.insert(0, __file__.rpartition("/sbx/guest/")[0])

from sbx.guest.supervisor import main  # the line above says where from

main()
