"""The attacks that `sbx doctor --attack` and tests/escape run on this host.

    attack.py           an attack as a value, and the meaning of its outcomes
    files.py            fs: files of the host, read-only mounts, uploads, set-id and device files
    processes.py        proc: PID 1, processes of the host, namespaces, users
    network.py          net: addresses, families of sockets, sockets of the host
    calls.py            kernel: system calls that no code inside needs
    resources.py        resources: the memory, files and processes of the host
    seal.py             seal: the walls as Linux reports them to code inside
    host_side.py        host: files that code plants in its workspace against the runtime
    host_executables.py names that a program of the host obeys, planted in its directory
    probe_program.py    the program that tries them, in a cell or outside of every wall
    syscall_numbers.py  the numbers of system calls
    decoys.py           the targets of the attacks: a file, a process and sockets
    runner.py           attacks sandboxes of a policy, and collects the results

Every attack is harmless where its wall is missing: users run them on their machines, and the tests
run them outside of every wall to show that they can succeed. An attack reads, opens without
writing, creates and removes its own file, or makes a system call with arguments that Linux refuses
(EFAULT, EINVAL) if no wall does. It takes bounded memory and processes, and signals only a decoy.
"""
