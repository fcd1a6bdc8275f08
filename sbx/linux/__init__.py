"""The system calls that sbx needs, one file for each Linux facility. Mechanisms only, no policy.

The package uses the standard library and nothing else of sbx, because these files are also mounted
inside the jail, where they run before the lockdown. Each file names its man page. Its functions
raise OSError with the name of the call in the text. `supported()`, or a similar function, returns
whether this Linux has the facility at all.
"""
