"""`sbx doctor`: which walls this host can enforce, and attacks that show that they hold.

    host_check   Linux, bubblewrap, cgroups, Landlock and the policies: what is there, with remedies
    attacks/     attacks from inside a sandbox, each with its expected result
    report       starts a sandbox, runs the attacks, and reports them

Imports `runtime` and lower packages.
"""
