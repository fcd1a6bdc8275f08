"""`sbx doctor`: the walls that this host can enforce, and attacks that test them.

    host_check   checks Linux, bubblewrap, cgroups, Landlock and the policies, with remedies
    resources    the CPUs, the memory and the load of the host
    attacks/     attacks from inside a sandbox, each with its expected result
    report       attacks sandboxes of each policy, and reports the results

Imports `runtime` and lower packages.
"""
