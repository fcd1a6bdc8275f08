"""Drop the rights of root in the process that parses HTTP. The broker, started first, keeps them.

    broker     gets the allowlist of the jails of all policies, and accepts no other one afterwards
    mounts     an own mount namespace: the necessary files, read-only and nosuid; everything else is
               hidden; only the data directory and the directory of the socket are writable
    uid        an unprivileged one, no supplementary groups, not dumpable
    capable    CAP_DAC_OVERRIDE, CAP_CHOWN, CAP_FOWNER, and never again another one (below)
    Landlock   only files there may be opened for writing, only programs and libraries for reading
    seccomp    the filter `serve`: no set-id files, no mounts, namespaces, ptrace, bpf, devices

The three capabilities are for the files of jails, each with another host uid: to read and write
them, to give them to their owner, and to change and remove files that their owner made sticky or
unreadable. Landlock restricts neither chmod(2) nor chown(2), nor connections to Unix sockets. The
mount namespace does: a read-only mount prevents a change of owner, and the sockets in /run, /var,
/tmp or a home (docker, dbus, databases, agents) are not visible. Of the host's root directory only
`_PROGRAMS`, /etc and /proc are visible as they are. The directories that policies mount exist, so
that they can be checked. If one is replaced later, only new jails of the cold path see the new one,
until the service restarts.

All of this applies to one thread or must precede the second one, so `drop` is called before an
event loop exists. It does all of it and verifies the result with Linux, or raises.
"""

import errno
import logging
import os
import platform
import pwd
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from sbx.agent.external.source import read_source, source_files
from sbx.api.server.private_mounts import show_only
from sbx.api.server.settings import ServiceSettings
from sbx.environments.directory import Environments
from sbx.environments.interpreter import interpreter_as, own_interpreter
from sbx.errors import BadRequest, Broken, SbxError, Unavailable
from sbx.isolation.broker.allowlist_from_policies import ProjectDirectories, grants
from sbx.isolation.broker.process import BrokerProcess
from sbx.isolation.launch_plan import Interpreter
from sbx.isolation.seccomp import load_filter, load_filters
from sbx.linux import capabilities, landlock, mountinfo, prctl, procfs, seccomp
from sbx.linux.landlock import FileRights
from sbx.policy import Policy, available, load
from sbx.runtime.settings import UNREADABLE, unreadable
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
    """Return the account of the serving process. Raise BadRequest `invalid_settings`."""
    name = settings.user
    if name is None:
        with suppress(KeyError):
            entry = pwd.getpwnam(_ACCOUNT)
            return Account(entry.pw_uid, entry.pw_gid)
        below = settings.uid_range[0] - 1  # no other process of the host has it
        return Account(below, below)
    uid, _, gid = name.partition(":")
    if uid.isdecimal() and (not gid or gid.isdecimal()):
        account = Account(int(uid), int(gid or uid))
    else:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            raise _wrong(f"this host has no account {name}") from None
        account = Account(entry.pw_uid, entry.pw_gid)
    first, count = settings.uid_range
    if 0 in account:
        raise _wrong("the process that parses HTTP must not be root")
    if first <= account.uid < first + count:
        raise _wrong("its uid is one of uid_range, which sandboxes get")
    return account


def prepare_data(path: Path, account: Account) -> None:
    """Create the data directory, and give it to the account.

    Its earlier user may have put anything into it, so no symlink in it is followed as root.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            path.mkdir(mode=0o711)
        top = _open_for(path, None, account, 0o711)
        try:
            with suppress(FileExistsError):
                os.mkdir("tmp", 0o700, dir_fd=top)
            os.close(_open_for(Path("tmp"), top, account, 0o700))
        finally:
            os.close(top)
    except OSError as error:
        raise BadRequest(
            f"the data directory {path} cannot be used: {error.strerror}",
            code="invalid_settings",
            hint="choose another one with --data-dir",
        ) from error


def _open_for(path: Path, parent: int | None, account: Account, mode: int) -> int:
    """Open a directory of root or the account, and give it to the account. Raise PermissionError if
    it belongs to another user."""
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
    """Give the broker its allowlist for the jails of every policy. Return the paths in it that
    `drop` must keep visible.

    `private`: further paths of sbx that may neither contain nor be in a project.

    Call this once, before `drop`. Later starts exclude a policy that cannot be loaded now, that has
    no environment yet, or whose environment this process can still change afterwards.
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
            sources.update(interpreter.prefixes)  # they are checked for changes
    return sorted(source for source in sources if os.path.exists(source))


def _projects(settings: ServiceSettings, private: Sequence[Path]) -> ProjectDirectories | None:
    if not settings.project_dirs or not settings.project_owners:
        return None
    own = settings.own_paths
    host = allowed_paths.host_facts(
        replace(own, private=(*own.private, *private)),
        settings.project_owners,
        mountinfo.read(),
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
        elif interpreter := interpreter_as(policy.interpreter, *account):
            yield policy, interpreter
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
    """Drop all rights except those in the docstring of the module, irrevocably.

    `shown`: the result of `confine`. Landlock still decides which of these paths are readable.
    `projects`: directories of users, which a project server may change.
    Raise Unavailable `cannot_drop` if this host lacks a layer: a service never parses HTTP with
    more rights than documented. The program must end then, because some steps may be done.
    """
    if not landlock.supported():
        raise _cannot("Landlock is not available", "boot Linux with lsm=landlock,...")
    if not seccomp.supported():
        raise _cannot("seccomp filters are not available", "use a Linux that has them")
    program = load_filter("serve", platform.machine()).program
    for path in settings.operator_directories:
        with suppress(OSError):  # a file in a directory that comes later would not be visible
            path.mkdir(parents=True, exist_ok=True)
    operator = [path for path in settings.operator_directories if path.exists()]
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
        raise _cannot(str(error), "`sbx doctor` lists the layers of this host") from error
    check(account)
    for path, cause in unreadable(operator):
        raise _cannot(f"{path} could then not be read: {cause.strerror}", UNREADABLE) from cause


def check(account: Account) -> None:
    """Compare the rights of this process, as Linux reports them. Raise Broken for a difference."""
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
        # The service connects to sockets of the host, such as the resolver's. The mount
        # namespace hides the others.
        rules.allow("/", FileRights.RESOLVE_UNIX)
        rules.enter()


def _readable(settings: ServiceSettings) -> list[str]:
    """Return the programs and libraries, the directories and files of the operator, and single
    files of the host that every user may read."""
    python = own_interpreter()
    paths = [
        *_PROGRAMS,
        *(f"/etc/{name}" for name in _ETC),
        *_SHOWN_OF_RUN,
        "/proc",
        *python.prefixes,
        *(str(_PROJECT / name) for name in ("sbx", "policies")),
        *map(str, settings.policy_dirs),
        str(settings.environments),
        *map(str, settings.operator_directories),
        *((str(settings.bwrap),) if settings.bwrap else ()),
        *filter(os.path.isfile, _secret_files(settings)),
    ]
    return [path for path in dict.fromkeys(paths) if os.path.exists(path)]


def _secret_files(settings: ServiceSettings) -> Iterator[str]:
    """Yield the files with the values of secrets, which policies name for the proxy, and those that
    sources of tools name."""
    with suppress(SbxError):  # each call of a tool reports it
        for path in source_files(settings.tools_dir).values():
            with suppress(SbxError):
                source = read_source(path)
                if source.openapi is not None:
                    yield str(source.openapi.document)
                yield from _files_of(source.secrets.values())
    for info in available(settings.policy_dirs):
        with suppress(SbxError):  # `confine` logged a warning
            policy = load(info.name, search=settings.policy_dirs)
            yield from _files_of(secret.source for secret in policy.secrets.values())


def _files_of(sources: Iterable[str]) -> Iterator[str]:
    return (source.removeprefix("file:") for source in sources if source.startswith("file:"))


def _wrong(problem: str) -> BadRequest:
    return BadRequest(
        f"the setting user is wrong: {problem}",
        code="invalid_settings",
        hint="name an unprivileged account: useradd --system sbx, then --user sbx",
    )


def _cannot(cause: str, remedy: str) -> Unavailable:
    return Unavailable(
        f"as root, the process that parses HTTP must give up its rights, and cannot: {cause}",
        code="cannot_drop",
        hint=f"{remedy}; or run the service as an unprivileged user",
    )
