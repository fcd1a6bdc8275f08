"""The built-in attacks: what `sbx doctor --attack` runs on this very host, and tests/escape too.

    attack.py           an attack as a value, and what its outcome means
    files.py            fs: files of the host, read-only mounts, uploads, set-id and device files
    processes.py        proc: PID 1, processes of the host, namespaces, users
    network.py          net: addresses, families of sockets, sockets of the host
    calls.py            kernel: linux calls that nobody inside needs
    resources.py        resources: what one sandbox may take from its host
    seal.py             seal: what linux itself says of the walls, asked from inside
    host_side.py        host: things that code plants in its workspace for the runtime to trip over
    catalogue.py        all of them
    probe_program.py    the program that tries them, as a cell does or outside of every wall
    syscall_numbers.py  the numbers of linux calls
    decoys.py           what the attacks are after: a file, a process and sockets of this host's own
    runner.py           sandboxes of a policy, attacked; what held and what did not

Every attack is harmless where its wall is missing, for this is run on machines that people use, and
by the tests outside of every wall to see that the attack can succeed: it reads, opens without
writing, makes and removes a file of its own, calls linux with arguments that it refuses (EFAULT,
EINVAL) once nothing else has; it takes bounded memory and processes, and signals nobody but a bait.
"""
