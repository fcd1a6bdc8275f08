"""As root: how the process that parses HTTP gives up what the broker, started before, keeps.

    broker     told what the jails of the policies are made of, and from then on nothing else
    shown      its own mount namespace: what is needed, read-only and nosuid, and the rest hidden;
               writable the data directory and the socket's
    uid        an unprivileged one, no supplementary groups, not dumpable
    capable    CAP_DAC_OVERRIDE, CAP_CHOWN, CAP_FOWNER, and never again another one (below)
    Landlock   opened are for writing only the files there, for reading only programs and libraries
    seccomp    the filter `serve`: no set-id files, no mounts, namespaces, ptrace, bpf, devices

The three capabilities are for the files of jails, each of which has a host uid of its own: to read
and write them, to give them to their owner, and to change and remove what that owner made sticky or
unreadable. Landlock minds neither chmod(2) nor chown(2), and no Unix socket that is connected to:
that is what the mount namespace is for. On a read-only mount nobody changes an owner, and what
listens in /run, /var, /tmp or a home (docker, dbus, databases, agents) is not there. Of the top of
the host's tree only what `_PROGRAMS` names, /etc and /proc are as they are. The directories that
policies show are there, so that they can be looked for; one that is exchanged for another later is
seen by new jails of the cold path only, until the service starts again.

All of it belongs to a thread or must come before the second one: `drop` is called before there is
an event loop. It either does all of it, and has looked that linux says so, or raises.
"""

import errno
import logging
import os
import platform
import pwd
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from sbx.api.server.private_mounts import show_only
from sbx.api.server.settings import ServiceSettings
from sbx.environments.directory import Environments
from sbx.environments.interpreter import interpreter_as, own_interpreter
from sbx.errors import BadRequest, Broken, SbxError, Unavailable
from sbx.isolation.broker.allowlist_from_policies import ProjectDirectories, grants
from sbx.isolation.broker.process import BrokerProcess
from sbx.isolation.plan import Interpreter
from sbx.isolation.seccomp import load_filter, load_filters
from sbx.linux import capabilities, landlock, mountinfo, prctl, procfs, seccomp
from sbx.linux.landlock import FileRights
from sbx.policy import Policy, available, load
from sbx.workspace import allowed_paths

_log = logging.getLogger(__name__)
KEPT = (
    1 << capabilities.CAP_CHOWN
    | 1 << capabilities.CAP_DAC_OVERRIDE
    | 1 << capabilities.CAP_FOWNER
)  # fmt: skip
_ACCOUNT = "sbx"
_PROJECT = Path(__file__).resolve().parents[3]
_PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt", "/nix/store")
_ETC = (
    "alternatives", "group", "host.conf", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d",
    "localtime", "mime.types", "nsswitch.conf", "os-release", "passwd", "python3", "resolv.conf",
    "sbx", "services", "ssl/certs", "ssl/openssl.cnf", "timezone",
)  # fmt: skip
_WHOLE = {*_PROGRAMS, "/etc", "/proc"}
_DEVICES = ("null", "zero", "full", "random", "urandom")
_SHOWN_OF_RUN = ("/run/systemd/resolve", "/run/resolvconf")  # where resolv.conf may lead to
# With symlinks: copies, checkpoints and commits of a workspace have those of its code. The broker,
# which is root, follows none below the data directory.
_WRITTEN = FileRights.EDIT & ~(FileRights.EXECUTE | FileRights.MAKE_FIFO)


class Account(NamedTuple):
    uid: int
    gid: int


def account_of(settings: ServiceSettings) -> Account:
    """Whom the serving process becomes. Raises BadRequest `invalid_settings`."""
    name = settings.user
    if name is None:
        with suppress(KeyError):
            found = pwd.getpwnam(_ACCOUNT)
            return Account(found.pw_uid, found.pw_gid)
        below = settings.uid_range[0] - 1  # nobody's: no other process of the host has it
        return Account(below, below)
    uid, _, gid = name.partition(":")
    if uid.isdecimal() and (not gid or gid.isdecimal()):
        account = Account(int(uid), int(gid or uid))
    else:
        try:
            found = pwd.getpwnam(name)
        except KeyError:
            raise _wrong(f"this host has no account {name}") from None
        account = Account(found.pw_uid, found.pw_gid)
    first, count = settings.uid_range
    if 0 in account:
        raise _wrong("whoever parses HTTP is not to be root")
    if first <= account.uid < first + count:
        raise _wrong("its uid is one of uid_range, which sandboxes get")
    return account


def prepare_data(path: Path, account: Account) -> None:
    """Make the data directory, and give it to who will use it.

    Who used it before may have put anything into it: no symlink there is followed as root.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=0o711)
    try:
        top = _given(path, None, account, 0o711)
        try:
            with suppress(FileExistsError):
                os.mkdir("tmp", 0o700, dir_fd=top)
            os.close(_given(Path("tmp"), top, account, 0o700))
        finally:
            os.close(top)
    except OSError as error:
        raise BadRequest(
            f"the data directory {path} cannot be used: {error.strerror}",
            code="invalid_settings",
            hint="choose another one with --data-dir",
        ) from error


def _given(path: Path, parent: int | None, account: Account, mode: int) -> int:
    """Open a directory that is root's or the account's already, as the account's own."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        if os.fstat(fd).st_uid not in (0, account.uid):
            raise PermissionError(errno.EPERM, "it belongs to another user")
        os.fchown(fd, *account)
        os.fchmod(fd, mode)
    except BaseException:
        os.close(fd)
        raise
    return fd


def confine(
    broker: BrokerProcess,
    settings: ServiceSettings,
    account: Account,
    *,
    writable: Sequence[Path],
    private: Sequence[Path] = (),
) -> list[str]:
    """Tell the broker what the jails of every policy are made of; what of that `drop` has to show.

    `private`: further paths of sbx that no project may hold or lie in.

    Once, before `drop`. A policy that cannot be loaded now is none, nor is one whose environment
    is not there yet, or lies where this process can still write afterwards.
    """
    machine = platform.machine()
    policies = list(_policies(settings, account))
    if any(settings.environments.is_relative_to(path) for path in writable):
        _log.warning("environments in %s are not used: this process could change them", writable[0])
    granted = grants(
        policies,
        broker.capabilities,
        load_filters(machine),
        guest=_PROJECT,
        data=settings.data,
        writable=writable,
        attachable=settings.mount_dirs,
        projects=_projects(settings, private),
    )
    broker.confine(granted)
    sources = {mount.source for policy, _ in policies for mount in policy.filesystem.mount}
    sources.update(os.path.abspath(path) for path in settings.mount_dirs)
    for policy, interpreter in policies:
        if policy.environment is not None:
            sources.update(interpreter.prefixes)  # which are looked at, to see if they changed
    return sorted(source for source in sources if os.path.exists(source))


def _projects(settings: ServiceSettings, private: Sequence[Path]) -> ProjectDirectories | None:
    if not settings.project_dirs or not settings.project_owners:
        return None
    own = settings.own_paths
    host = allowed_paths.host_facts(
        replace(own, private=(*own.private, *private)), settings.project_owners, mountinfo.read()
    )
    return ProjectDirectories(
        within=[os.path.realpath(path) for path in settings.project_dirs],
        owners=list(settings.project_owners),
        host=host,
    )


def _policies(settings: ServiceSettings, account: Account) -> Iterator[tuple[Policy, Interpreter]]:
    own = own_interpreter()
    search = settings.policy_dirs
    environments = Environments(settings.environments)
    for info in available(search):
        try:
            policy = load(info.name, search=search)
        except SbxError as error:
            _log.warning("the policy %s cannot be used: %s", info.name, error)
            continue
        if policy.interpreter is None:
            yield policy, own
        elif (name := policy.environment) is not None:
            try:
                yield policy, environments.interpreter(name, info.name)
            except SbxError as error:
                _log.warning("%s", error)
        elif found := interpreter_as(policy.interpreter, *account):
            yield policy, found
        else:
            _log.warning("the interpreter of policy %s does not answer", info.name)


def drop(
    settings: ServiceSettings,
    account: Account,
    *,
    writable: Sequence[Path],
    shown: Sequence[str] = (),
    projects: Sequence[Path] = (),
) -> None:
    """Give up everything but what the module's docstring names. For good, and all or nothing.

    `shown`: what `confine` gave; paths that are there, and no more readable than Landlock says.
    `projects`: directories of users, which a project server may change.
    Raises Unavailable `cannot_drop` where this host lacks a layer: a service that would parse HTTP
    with more rights than said is not started. The program must end then: some of it may be done.
    """
    if not landlock.supported():
        raise _cannot("Landlock is not there", "boot linux with lsm=landlock,...")
    if not seccomp.supported():
        raise _cannot("seccomp filters are not there", "use a linux that has them")
    program = load_filter("serve", platform.machine()).program
    readable = _readable(settings)
    tempfile.tempdir = str(settings.data / "tmp")
    os.environ["TMPDIR"] = tempfile.tempdir
    try:
        show_only(
            _WHOLE,
            [*readable, *shown],
            list(map(str, (*writable, *projects))),
            devices=[f"/dev/{name}" for name in _DEVICES],
            links=dict(own_interpreter().links),
        )
        _become(account)
        _confine(readable, writable, projects)
        seccomp.install(program)
    except (OSError, RuntimeError) as error:
        raise _cannot(str(error), "`sbx doctor` says what this host gives") from error
    check(account)


def check(account: Account) -> None:
    """Look at what linux says of this process. Raises Broken when it is not what was meant."""
    sets = capabilities.current()
    seen = procfs.credentials("thread-self")
    ids = {*os.getresuid()}, {*os.getresgid()}, {*os.getgroups()}
    if (
        ids != ({account.uid}, {account.gid}, set())
        or sets != capabilities.CapabilitySets(KEPT, KEPT, 0, 0, 0)
        or not seen.no_new_privs
        or seen.seccomp != 2
    ):
        raise Broken(f"privileges were not dropped as meant: {ids}, {sets}, {seen}")
    for path in ("/etc/shadow", "/etc/gshadow", "/root"):
        try:
            os.close(os.open(path, os.O_RDONLY))
        except OSError:
            continue
        raise Broken(f"privileges were not dropped as meant: {path} can be read")


def _become(account: Account) -> None:
    prctl.set_keep_capabilities(True)
    capabilities.empty_bounding()
    os.setgroups([])
    os.setresgid(account.gid, account.gid, account.gid)
    os.setresuid(account.uid, account.uid, account.uid)
    capabilities.keep_only(KEPT)
    prctl.set_keep_capabilities(False)
    prctl.set_dumpable(False)
    prctl.set_no_new_privs()
    os.chdir("/")


def _confine(readable: Iterable[str], writable: Iterable[Path], projects: Sequence[Path]) -> None:
    with landlock.Ruleset(scope_signals=True, scope_abstract_sockets=True) as rules:
        for path in readable:
            rules.allow(path, FileRights.READ)
        for name in _DEVICES:
            rules.allow(f"/dev/{name}", FileRights.DEVICE)
        for where in (*writable, *projects):
            rules.allow(str(where), _WRITTEN)
        # The service connects to sockets of the host, as the resolver's: what it may not use is
        # not shown to it.
        rules.allow("/", FileRights.RESOLVE_UNIX)
        rules.enter()


def _readable(settings: ServiceSettings) -> list[str]:
    """Programs and libraries, and of the rest of the host single files that are for everybody."""
    python = own_interpreter()
    found = [
        *_PROGRAMS,
        *(f"/etc/{name}" for name in _ETC),
        *_SHOWN_OF_RUN,
        "/proc",
        *python.prefixes,
        *(str(_PROJECT / name) for name in ("sbx", "policies")),
        *map(str, settings.policy_dirs),
        str(settings.environments),
        *((str(settings.bwrap),) if settings.bwrap else ()),
        *_secret_files(settings),
    ]
    return [path for path in dict.fromkeys(found) if os.path.exists(path)]


def _secret_files(settings: ServiceSettings) -> Iterator[str]:
    """Where policies say that the values of their secrets lie, which the proxy is to use."""
    for info in available(settings.policy_dirs):
        with suppress(SbxError):  # one that cannot be loaded was warned of
            policy = load(info.name, search=settings.policy_dirs)
            sources = [secret.source for secret in policy.secrets.values()]
            yield from (one.removeprefix("file:") for one in sources if one.startswith("file:"))


def _wrong(said: str) -> BadRequest:
    return BadRequest(
        f"the setting user is wrong: {said}",
        code="invalid_settings",
        hint="name an unprivileged account: useradd --system sbx, then --user sbx",
    )


def _cannot(cause: str, remedy: str) -> Unavailable:
    return Unavailable(
        f"as root, the process that parses HTTP must give up its rights, and cannot: {cause}",
        code="cannot_drop",
        hint=f"{remedy}; or run the service as an unprivileged user",
    )
