"""Speed and memory, each figure beside its baseline in the same run: the machines are shared.

    samples.py          what a row is, what came out, sample and baseline in turn
    paths.py            which way a kernel comes to be: how a row forces it, and checks that it did
    baseline.py         what people have today: ipykernel by jupyter_client, a subprocess, bwrap
    processes.py        memory, CPU time and the end of processes, as linux tells them
    at_once.py          many of the same at a time

    acquire.py          acquire_pool, acquire_fork: a kernel with pandas for a sandbox that has none
    cold_start.py       from nothing to the result of 1+1, every process started anew
    cells.py            cell_roundtrip, first_byte
    shell.py            shell_roundtrip
    teardown.py         from the kill until nothing is left
    disk.py             disk_end: from a write beyond the disk limit until the run has ended
    churn.py            create, run, destroy: how many in a second
    parallel_create.py  fifty asked for in the same instant
    attacks.py          what one sandbox may do to use up its host; tests strike with it, too
    neighbour.py        neighbour: how much slower the cells of another sandbox become meanwhile
    agent_step.py       agent_step: what an agent's loop adds to model and tools
    jupyter.py          jupyter_start, jupyter_pandas, jupyter_cell: a kernel for a notebook client
    notebook.py         such a client: the same for ours and for ipykernel
    density.py          pss_idle, idle_cpu: what kernels cost that do nothing
    torture/            no row: clients work on a service under faults, and a checker judges it
    __main__.py         the command

Sample and baseline alternate, so that a busy moment hits both; p50 and minimum are to be quoted.
A row that would measure another path than its name says fails instead.
"""
