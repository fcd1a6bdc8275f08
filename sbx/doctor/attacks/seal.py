"""seal: the walls as Linux reports them to code inside."""

from sbx.doctor.attacks.attack import Class, attacks

SHARED = attacks(
    Class.SEAL,
    "namespaces",
    {
        f"share the {kind} namespace of the host": (
            f"held_if(os.readlink('/proc/self/ns/{kind}') != HOST['namespaces']['{kind}'])"
        )
        for kind in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")
    }
    | {
        "bear the name of the host": "held_if(os.uname().nodename == 'sandbox')",
        "be in a group of cgroups that names the host's": """
held_if(all(line.rstrip().endswith(":/") for line in open("/proc/self/cgroup")))
""",
        "see more processes than a sandbox may have": """
held_if(len([n for n in os.listdir("/proc") if n.isdigit()]) <= LIMITS["tasks"] + 2)
""",
        "see mounts that pass on to the host": """
held_if("shared:" not in open("/proc/self/mountinfo").read())
""",
        "have a mount where set-id programs work": """
for line in open("/proc/self/mountinfo"):
    if "nosuid" not in line.split()[5].split(","):
        break
else:
    raise Held
""",
        "write to a root that is not read-only": "held_if(os.statvfs('/').f_flag & os.ST_RDONLY)",
    },
)

RIGHTS = attacks(
    Class.SEAL,
    "privileges",
    {
        f"have a capability in {field}": f"held_if(int(status('{field}'), 16) == 0)"
        for field in ("CapPrm", "CapEff", "CapBnd")
    }
    | {
        "be able to get privileges by a program": "held_if(status('NoNewPrivs') == '1')",
        "have an id of root": "held_if(0 not in os.getresuid() + os.getresgid())",
    },
) + attacks(
    Class.SEAL,
    "seccomp",
    {
        "run without a filter": "held_if(status('Seccomp') == '2')",
        "run threads without a filter": """
found = []
thread = threading.Thread(target=lambda: found.append(status("Seccomp")))
thread.start(); thread.join()
held_if(found == ["2"])
""",
    },
)

LEAKS = attacks(
    Class.SEAL,
    "runtime",
    {
        "find a variable of the program that uses sbx": (
            "held_if(not any(HOST['token'] in value for value in os.environ.values()))"
        ),
        "hold a descriptor of the host": """
for name in os.listdir("/proc/self/fd"):
    try:
        target = os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        continue
    if target.startswith((os.path.dirname(HOST["file"]), "/root", "/home", "/run", "/var")):
        break
else:
    raise Held
""",
        "hold a pipe or a socket of a terminal": "held_if(not any(map(os.isatty, range(3))))",
        "import from the current directory before the packages": (
            "held_if(sys.flags.isolated and sys.flags.no_user_site)"
        ),
    },
)

SEAL = (*SHARED, *RIGHTS, *LEAKS)
