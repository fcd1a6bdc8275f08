"""A kernel from the pool, one forked on order and one started cold: linux sees no difference.

Each of their processes tells all that linux tells of it. What must differ is left out by name, with
the reason; everything else is compared as it is, so that what nobody thought of shows up as well.
"""

import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from attacking import PATHS, by, prelude

from sbx import Runtime
from sbx.runtime.sandbox import AsyncSandbox

pytestmark = pytest.mark.core
FORKED = PATHS[:2]
TELL = """
import fcntl, glob, resource, sched  # noqa
def lines(path):
    try:
        return open(path).read().splitlines()
    except OSError as error:
        return [errno.errorcode[error.errno]]
def table(path):
    return dict(line.split(':', 1) for line in lines(path) if ':' in line)
def shown():
    'The mount that paths lead to: who looks into it is on the device that the line names.'
    found = {}
    for line in lines('/proc/self/mountinfo'):
        left, right = line.split(' - ')
        where, options, kind = left.split()[4], left.split()[5], right.split()[0]
        seen = os.stat(where).st_dev
        if left.split()[2] == f'{os.major(seen)}:{os.minor(seen)}':
            found[where] = (kind, sorted(options.split(',')), left.split()[6:])
    return found
def limits(path):
    return [line[:66].split() for line in lines(path)]
def descriptors():
    kinds = []
    for fd in map(int, os.listdir('/proc/self/fd')):
        try:
            kind = os.readlink(f'/proc/self/fd/{fd}').split(':[')[0].split('/')[0:3]
        except OSError:
            continue
        flags = fcntl.fcntl(fd, fcntl.F_GETFD), fcntl.fcntl(fd, fcntl.F_GETFL)
        kinds.append((['/'.join(kind)], flags, fd if fd < 3 else None))
    return sorted(map(str, kinds))
def prctls():
    found = {}
    for option in (2, 3, 7, 21, 23, 25, 27, 30, 35, 37, 39, 42, 46, 48, 53, 57, 66, 68, 70):
        value = ctypes.c_long(-1)
        pointed = option in (2, 25, 35, 37)
        got = _libc.prctl(option, ctypes.byref(value) if pointed else 0, 0, 0, 0)
        found[option] = got, value.value if pointed else None
    return found
def facts(pid):
    return {
        'status': table(f'/proc/{pid}/status'),
        'limits': limits(f'/proc/{pid}/limits'),
        'groups': lines(f'/proc/{pid}/cgroup'),
        'oom score': lines(f'/proc/{pid}/oom_score_adj'),
        # not what it is outside, which for bwrap is a number of the namespace in between
        'uid map': [l.split()[::2] for n in ('uid', 'gid') for l in lines(f'/proc/{pid}/{n}_map')],
        'set groups': lines(f'/proc/{pid}/setgroups'),
        'sessions': lines(f'/proc/{pid}/loginuid') + lines(f'/proc/{pid}/sessionid'),
        'core filter': lines(f'/proc/{pid}/coredump_filter'),
        'policy': table(f'/proc/{pid}/sched').get('policy                                      '),
        'slack': lines(f'/proc/{pid}/timerslack_ns'),
        'tty': lines(f'/proc/{pid}/stat')[0].rpartition(')')[2].split()[4:6],
    }
OF_THE_VIEW = ('/', '/dev', '/dev/pts', '/dev/pts/ptmx', '/opt', '/opt/sbx', '/etc', '/sandbox',
               '/home')
def told():
    umask = os.umask(0o22)
    os.umask(umask)
    personality = _libc.personality(0xFFFFFFFF)
    return {
        'own': facts('self'), 'pid 1': facts(1),
        'mounts': shown(), 'descriptors': descriptors(), 'prctl': prctls(),
        'environment': dict(os.environ), 'umask': umask, 'personality': personality,
        'ids': (os.getresuid(), os.getresgid(), os.getgroups()),
        'alone': (os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()),
        'scheduling': (os.sched_getscheduler(0), os.nice(0), sorted(os.sched_getaffinity(0))),
        'io': names_of(call, IOPRIO_GET, 1, 0), 'directory': os.getcwd(),
        'signals': {n: str(signal.getsignal(n)).split(' at ')[0] for n in range(1, 65)
                    if n not in (9, 19, 32, 33)},
        'mask': sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        'keys': lines('/proc/keys'), 'host': os.uname().nodename,
        # the cold path sets these one namespace above: bwrap makes two, and the last has its own
        'limits of namespaces': {p: lines(p) for p in glob.glob('/proc/sys/user/max_*')
                                 if 'max_user' not in p and 'max_inotify' not in p},
        'root': sorted(os.listdir('/')), 'dev': sorted(os.listdir('/dev')),
        # in the cold path the sandbox's uid has made the view, otherwise the zygote's
        'modes': {p: (oct(os.stat(p).st_mode), p not in OF_THE_VIEW and os.stat(p).st_uid)
                  for p in ('/', '/tmp', '/dev', '/dev/shm', '/dev/pts', '/dev/pts/ptmx', '/proc',
                            '/workspace', '/workspace/uploads', '/workspace/uploads/temparea',
                            '/opt', '/opt/sbx', '/etc', '/sandbox', '/home', '/uploads')
                  if os.path.exists(p)},
        'sizes': {p: os.statvfs(p).f_blocks * os.statvfs(p).f_frsize for p in ('/tmp', '/dev/shm')},
        'interfaces': lines('/proc/net/dev')[2:] and [l.split()[0] for l in lines('/proc/net/dev')],
        'path': sys.path, 'arguments': sys.argv, 'flags': str(sys.flags),
    }
""".replace("IOPRIO_GET", "252")
# memory, faults, counters, numbers; and SigCgt, for libc has a handler where a thread has been
OF_THE_MOMENT = (
    "Vm", "Rss", "voluntary", "nonvoluntary", "HugetlbPages", "Pid", "Tgid", "PPid", "NSpid",
    "NStgid", "NSpgid", "NSsid", "Threads", "SigQ", "Name", "State", "FDSize", "x86_Thread",
    "Cpus_allowed", "Mems_allowed", "Ngid", "untag_mask", "THP_enabled", "SigCgt",
)  # fmt: skip


@pytest_asyncio.fixture(scope="module")
async def answers() -> AsyncIterator[dict[str, dict[str, Any]]]:
    """By path and process: what `told()` says in a kernel and in a command beside it."""
    found: dict[str, dict[str, Any]] = {}
    async with Runtime() as runtime:
        for path in PATHS:
            with by(path):
                async with await runtime.create(env={"TOLD": "1"}) as box:
                    kernel = await box.run(f"{prelude()}{TELL}\ntold()")
                    assert kernel.result is not None, kernel.error
                    found[path] = {
                        "kernel": plain(eval(kernel.result, {})),
                        "command": await of_command(box),
                    }
    yield found


async def of_command(box: AsyncSandbox) -> dict[str, Any]:
    code = f"{prelude()}{TELL}\nprint(told())"
    done = await box.shell(f"exec {sys.executable} -I -", stdin=code)
    assert done.ok, done.stderr
    return plain(eval(done.stdout, {}))


def plain(found: dict[str, Any]) -> dict[str, Any]:
    for process in ("own", "pid 1"):
        status = found[process]["status"]
        for name in [name for name in status if name.startswith(OF_THE_MOMENT)]:
            del status[name]
    return found


@pytest.mark.parametrize("process", ["kernel", "command"])
@pytest.mark.parametrize("path", FORKED)
async def test_a_forked_process_is_as_one_of_the_cold_path(
    answers: dict[str, dict[str, Any]], path: str, process: str
) -> None:
    assert answers[path][process] == answers["cold"][process]
