"""The seccomp filters: one table, and the programs prebuilt from it.

    table.py     what is refused, how, and why: the file to read and to change
    compiler.py  table → classic BPF, for x86_64 and aarch64 alike
    *.bpf          its output, one instruction a line, under the decisions it encodes
    loader.py  load_filter(name, machine): all that a running sbx needs

`scripts/filters` writes the `.bpf` files again, and tests/meta holds them to the table. They are
built beforehand so that a jail starts without libseccomp, and so that a change of what is refused
is a diff that a person reads.

    default   for every process of every jail
    strict    put on top of it once the kernel is up; of two filters the stricter answer counts
    allowlist default, and of what that allows only the calls that were named: every process of a
              jail whose policy asks for it has it as well, and strict stands on it
    no_unix   on top of those for the kernel and the commands, where the policy takes Unix sockets
              away
    serve     for the process of a root service that parses HTTP

Our own compiler, not libseccomp's: that one cannot name calls newer than itself for another
architecture, cannot put two conditions on one argument (personality: anything but 0 and ~0), and
gives other bytes in each version. It still is where the numbers of the calls come from.

May import: sbx.linux, sbx.errors.
"""

from sbx.isolation.seccomp.loader import Filter, Filters, load_filter, load_filters

__all__ = ["Filter", "Filters", "load_filter", "load_filters"]
