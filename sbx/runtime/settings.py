"""The settings of a runtime, from keyword arguments or the environment (SBX_*)."""

import os
import pwd
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from platformdirs import user_config_path, user_data_path
from pydantic import BeforeValidator, Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict, SettingsError

from sbx import settings_files
from sbx.errors import BadRequest, SbxError
from sbx.policy import directories
from sbx.policy.find import shipped_directory
from sbx.policy.templates import name_pairs
from sbx.protocol.addresses import default_socket
from sbx.workspace.allowed_paths import OwnPaths
from sbx.workspace.quarantine import HostProtection

_FIRST_UID = 1_900_000_000  # above the uids of systemd for containers (systemd.io/UIDS-GIDS)
_UIDS = 100_000_000
_Count = Annotated[int, Field(ge=1, le=1_000_000)]
UNREADABLE = "name another directory in the setting (agents_dir, tools_dir, tasks_dir)"


def unreadable(directories: Iterable[Path]) -> Iterator[tuple[Path, OSError]]:
    """Yield each directory that cannot be listed, with the error."""
    for path in directories:
        try:
            os.listdir(path)
        except OSError as error:
            yield path, error


def _default_environments() -> Path:
    """Return a directory outside of /var/lib/sbx: the process that parses HTTP writes there."""
    if os.geteuid() == 0:
        return Path("/var/lib/sbx-environments")
    return user_data_path("sbx") / "environments"


def _uid(value: Any) -> Any:
    if not isinstance(value, str) or value.isdecimal():
        return value
    try:
        return pwd.getpwnam(value).pw_uid
    except KeyError:
        raise ValueError(f"this host has no account {value!r}") from None


def _own_paths_in_files() -> OwnPaths:
    """Return the paths of services in the user's and the system's sbx.toml: a workspace may contain
    them. Raise as `settings_files` does for the user's file."""
    files = [settings_files.SYSTEM / settings_files.NAME]
    with suppress(RuntimeError):  # neither HOME nor an account
        files.append(settings_files.config_directory() / settings_files.NAME)
    if named := os.environ.get("SBX_CONFIG"):
        files.append(Path(named))
    each = [own_paths_of(_values_of(path)) for path in dict.fromkeys(files)]
    private = tuple(path for own in each for path in own.private)
    return OwnPaths(private, tuple(path for own in each for path in own.code))


def _values_of(path: Path) -> Mapping[str, Any]:
    try:
        text = settings_files.read(path)
        return settings_files.toml(path, text) if text is not None else {}
    except SbxError as error:
        # The system's file may be for root only, and this process may have dropped its rights.
        refused = isinstance(error.__context__, PermissionError)
        of_another = path.parent == settings_files.SYSTEM and os.geteuid() != 0
        if refused or of_another:
            return {}
        raise


def own_paths_of(values: Mapping[str, Any]) -> OwnPaths:
    """Return the paths of a service with these settings. A relative path counts from the directory
    in which the service starts: such a data directory is known by its marker only. Pure but for
    the home."""
    data, sockets = _absolute(values.get("data_dir")), _absolute(values.get("socket"))
    of_projects = (Path(f"{path}-projects") for path in data)
    policies = values.get("policy_dirs", values.get("policies", ()))
    code = (*_absolute(values.get("environments")), *_absolute(values.get("bwrap")))
    for directory in policies if isinstance(policies, list) else ():
        code += _absolute(directory)
    return OwnPaths((*data, *of_projects, *sockets), code)


def _absolute(value: Any) -> tuple[Path, ...]:
    if not isinstance(value, str) or "\0" in value:
        return ()
    path = Path(os.path.expanduser(value))
    return (path,) if path.is_absolute() else ()


def _directories(value: Any) -> Any:
    """Split the directories of a variable, which are separated as in PATH. In TOML it is a list."""
    return [part for part in value.split(os.pathsep) if part] if isinstance(value, str) else value


class Settings(BaseSettings):
    """Settings of a runtime. Durations in seconds.

    `data_dir`: the directory of workspaces; None is a private temporary directory of the runtime.
    `policy_aliases`: names that clients use for a policy, such as `python-default`, each with the
    policy that it means. Only this one of the shipped names can mean another policy.
    `environments`: the directory of the environments of `sbx env`, which policies name `env:NAME`.
    `mount_dirs`: a service may mount these directories, and directories below them, into live
    sandboxes. A service that root started mounts them read-only. A program that embeds sbx is not
    restricted by this setting.
    `agents_dir`: the directory of the profiles of agents, as `{agent_id}.toml`.
    `tools_dir`: the directory of the sources of external tools, as `{name}.toml`.
    `tasks_dir`: the directory of the templates of tasks, as `{name}.toml`.
    `project_dirs`: a project may have one of these directories, or one below them, as its working
    directory; none by default.
    `project_owners`: accounts, by name or uid. Projects may use their directories although no jail
    can run as that account: root, and every owner if the service has dropped root's rights. The
    directories are mapped, and jails keep their uids. None by default.
    `allow_host_mode`: a project may turn its sandbox off. Then tools act on the host itself, with
    all rights of the user of this process.
    `host_executables_add`, `host_executables_remove`: patterns of names to add to, or remove from,
    the table of files that programs of the host execute (`sbx.workspace.host_executables`).
    `fast_path`: kernels may be forked and kept ready; False leaves only the cold path.
    `zygotes_max`: the number of policies with a zygote; each zygote takes 40 to 100 MiB.
    `disk_quota`: whether Linux limits the size of workspaces, by project quotas, which take root
    and a suitable file system: `auto` if available, `required` refuses sandboxes otherwise, `off`
    relies on a watcher that kills kernels.
    `uid_range`: the first host uid, and the number of uids for the sandboxes and zygotes of a root
    broker.

    The other settings are for a service with persistent sandboxes: the largest number of sandboxes
    and live kernels, in all and per owner; workspaces per owner, in addition to those of sandboxes;
    runs that may wait in a conversation; the idle time-out of a kernel; the interval of garbage
    collection (0: only on request); the time for which files outlive the expiry of their sandbox,
    and tombstones their sandbox; the runs in the history of a sandbox; the bytes of a file of the
    audit log, and the time for which it gets lines; the bytes of available memory below which idle
    kernels are ended (None: a tenth of all memory, at most 1 GiB).
    Raise BadRequest `invalid_settings` with the name of the wrong setting.
    """

    model_config = SettingsConfigDict(env_prefix="SBX_", frozen=True, extra="forbid")

    data_dir: Path | None = None
    policy_dirs: Annotated[tuple[Path, ...], NoDecode, BeforeValidator(_directories)] = Field(
        default_factory=lambda: (user_config_path("sbx") / "policies",)
    )
    policy_aliases: Annotated[Mapping[str, str], NoDecode, BeforeValidator(name_pairs)] = {}
    environments: Path = Field(default_factory=_default_environments)
    bwrap: Path | None = None
    cgroups: bool = True
    disk_quota: Literal["off", "auto", "required"] = "auto"
    uid_range: tuple[Annotated[int, Field(gt=0)], Annotated[int, Field(gt=0)]] = (
        _FIRST_UID,
        _UIDS,
    )
    mount_dirs: tuple[Path, ...] = ()
    agents_dir: Path = Field(default_factory=lambda: user_config_path("sbx") / "agents")
    tools_dir: Path = Field(default_factory=lambda: user_config_path("sbx") / "tools")
    tasks_dir: Path = Field(default_factory=lambda: user_config_path("sbx") / "tasks")
    project_dirs: tuple[Path, ...] = ()
    project_owners: tuple[Annotated[int, BeforeValidator(_uid), Field(ge=0)], ...] = ()
    allow_host_mode: bool = False
    host_executables_add: tuple[str, ...] = ()
    host_executables_remove: tuple[str, ...] = ()
    fast_path: bool = True
    zygotes_max: Annotated[int, Field(ge=1, le=1000)] = 8
    start_timeout: Annotated[float, Field(gt=0)] = 30.0
    interrupt_grace: Annotated[float, Field(gt=0)] = 1.0

    sandboxes_max: _Count = 1000
    sandboxes_per_owner: _Count = 200
    workspaces_per_owner: _Count = 500
    kernels_max: _Count = 100
    kernels_per_owner: _Count = 50
    queue_max: _Count = 16
    idle_timeout: Annotated[float, Field(gt=0)] = 1800.0
    gc_interval: Annotated[float, Field(ge=0)] = 300.0
    files_grace: Annotated[float, Field(ge=0)] = 7 * 86400.0
    tombstones_kept: Annotated[float, Field(ge=0)] = 30 * 86400.0
    history_max: _Count = 10_000
    audit_size_max: Annotated[int, Field(ge=1)] = 64 << 20
    audit_rotation: Literal["never", "day", "month"] = "month"
    memory_reserve: Annotated[int, Field(ge=0)] | None = None

    @field_validator("policy_aliases")
    @classmethod
    def _are_no_shipped_policies(cls, value: Mapping[str, str]) -> Mapping[str, str]:
        for alias in value:
            if (shipped_directory() / f"{alias}.toml").exists():
                raise ValueError(f"'{alias}' is the name of a policy that comes with sbx")
        return value

    @property
    def protection(self) -> HostProtection:
        """Return the protection of host executables in a directory of the host."""
        top = self.data_dir
        if top is None:
            try:
                top = user_data_path("sbx")
            except RuntimeError:  # neither HOME nor an account
                top = Path(tempfile.gettempdir(), f"sbx-{os.geteuid()}")
        add, remove = self.host_executables_add, self.host_executables_remove
        return HostProtection(top / "quarantine", add, remove)

    @property
    def own_paths(self) -> OwnPaths:
        """Return the paths of this runtime and of all sbx of this user. No sandbox may see them."""
        with_defaults = [*self.private]
        for path_of in (user_data_path, user_config_path):
            with suppress(RuntimeError):  # neither HOME nor an account
                with_defaults.append(path_of("sbx"))
        with_defaults += map(Path, ("/etc/sbx", "/var/lib/sbx", "/var/lib/sbx-environments"))
        with suppress(RuntimeError):  # neither HOME nor an account
            with_defaults.append(default_socket())
        own = [self.environments, *self.operator_directories]
        own += [self.bwrap] if self.bwrap is not None else []  # it starts each sandbox
        code = (*directories(self.policy_dirs), *own)
        in_files = _own_paths_in_files()
        return OwnPaths((*with_defaults, *in_files.private), (*code, *in_files.code))

    @property
    def operator_directories(self) -> tuple[Path, ...]:
        """Return the directories whose files limit agents. One that is not visible would be one
        without files, so an agent would run without its limits."""
        return self.agents_dir, self.tools_dir, self.tasks_dir

    @property
    def private(self) -> tuple[Path, ...]:
        """Return the data and the sockets of this runtime."""
        return (self.data_dir,) if self.data_dir is not None else ()

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = str(first["loc"][0]) if first["loc"] else "?"
            raise BadRequest(
                f"the setting {name} (SBX_{name.upper()}) is wrong: {first['msg']}",
                code="invalid_settings",
                hint="correct it, or leave it out for its default",
            ) from None
        except SettingsError as error:
            raise BadRequest(
                f"a setting of the environment (SBX_*) cannot be read: {error}",
                code="invalid_settings",
                hint="lists are written as JSON, as in [1900000000, 1000]",
            ) from None
