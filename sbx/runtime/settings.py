"""What an operator may choose, from keyword arguments or the environment (SBX_*)."""

import os
import pwd
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from platformdirs import user_config_path, user_data_path
from pydantic import BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from sbx import settings_files
from sbx.errors import BadRequest, SbxError
from sbx.policy import directories
from sbx.protocol.addresses import default_socket
from sbx.workspace.allowed_paths import OwnPaths
from sbx.workspace.quarantine import HostProtection

_FIRST_UID = 1_900_000_000  # above what systemd gives to containers (systemd.io/UIDS-GIDS)
_UIDS = 100_000_000
_Count = Annotated[int, Field(ge=1, le=1_000_000)]


def _default_environments() -> Path:
    """Not below /var/lib/sbx: that is for the process that parses HTTP to write to."""
    if os.geteuid() == 0:
        return Path("/var/lib/sbx-environments")
    return user_data_path("sbx") / "environments"


def _uid(value: Any) -> Any:
    """The uid of an account by its name, or a uid itself."""
    if not isinstance(value, str) or value.isdecimal():
        return value
    try:
        return pwd.getpwnam(value).pw_uid
    except KeyError:
        raise ValueError(f"this host has no account {value!r}") from None


def _own_paths_in_files() -> OwnPaths:
    """Return the paths of services that the user's and the system's sbx.toml name: a workspace may
    contain them. Raises as `settings_files` does for the user's file."""
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
        unreadable = isinstance(error.__context__, PermissionError)
        of_another = path.parent == settings_files.SYSTEM and os.geteuid() != 0
        if unreadable or of_another:
            return {}
        raise


def own_paths_of(values: Mapping[str, Any]) -> OwnPaths:
    """Return the paths of a service with these settings. A relative path counts from the directory
    in which the service starts: such a data directory is known by its marker only. Pure but for
    the home."""
    data, sockets = _absolute(values.get("data_dir")), _absolute(values.get("socket"))
    of_projects = (Path(f"{path}-projects") for path in data)
    policies = values.get("policy_dirs", values.get("policies", ()))
    code = _absolute(values.get("environments"))
    for directory in policies if isinstance(policies, list) else ():
        code += _absolute(directory)
    return OwnPaths((*data, *of_projects, *sockets), code)


def _absolute(value: Any) -> tuple[Path, ...]:
    if not isinstance(value, str) or "\0" in value:
        return ()
    path = Path(os.path.expanduser(value))
    return (path,) if path.is_absolute() else ()


class Settings(BaseSettings):
    """Settings of a runtime. Durations in seconds.

    `data_dir`: where workspaces lie; None is a private temporary directory, gone with the runtime.
    `environments`: where those lie that `sbx env` makes, and policies name as `env:NAME`.
    `mount_dirs`: directories of which, and of what lies below them, a service may mount some into
    sandboxes that live; one that was started as root does so read-only, and a program that embeds
    sbx decides by itself.
    `project_dirs`: directories of which, and of what lies below them, one may be the working
    directory of a project; none by default.
    `project_owners`: accounts, by name or uid, whose directories projects may have although no jail
    can run as that account: root, and every owner where the service has given up root's rights. The
    directories are mapped: jails keep uids of their own. None by default.
    `allow_host_mode`: a project may turn its sandbox off, so that what a model asks for is done on
    the host itself, with all that the user who runs this may do.
    `host_executables_add`, `host_executables_remove`: patterns of names to add to, or remove from,
    the table of files that a program of the host obeys (`sbx.workspace.host_executables`).
    `fast_path`: kernels may be forked and kept ready; False leaves only the cold path.
    `zygotes_max`: for how many policies at once; each zygote holds some 40 to 100 MiB.
    `disk_quota`: whether linux itself holds workspaces to their size, by project quotas, for which
    it takes root and a file system that has them: `auto` where it can be had, `required` refuses
    sandboxes where it cannot, `off` leaves it to looking and killing everywhere.
    `uid_range`: first host uid and how many, from which a root broker gives each sandbox its own.

    What follows counts for a service, which keeps sandboxes: how many of them and of live kernels
    there may be, in all and per owner; how many workspaces an owner may have in addition to those
    that sandboxes made; how many runs may wait in a conversation; after how long without use a
    kernel is ended; how often leftovers are collected (0: only when asked to); how long files
    outlive their sandbox's expiry, and tombstones their sandbox; how many runs the history of a
    sandbox keeps; below how many bytes of available memory idle kernels are ended (None: a tenth
    of it, 1 GiB at most).
    Raises BadRequest `invalid_settings`, naming the one that is wrong.
    """

    model_config = SettingsConfigDict(env_prefix="SBX_", frozen=True, extra="forbid")

    data_dir: Path | None = None
    policy_dirs: tuple[Path, ...] = Field(
        default_factory=lambda: (user_config_path("sbx") / "policies",)
    )
    environments: Path = Field(default_factory=_default_environments)
    bwrap: Path | None = None
    cgroups: bool = True
    disk_quota: Literal["off", "auto", "required"] = "auto"
    uid_range: tuple[Annotated[int, Field(gt=0)], Annotated[int, Field(gt=0)]] = (
        _FIRST_UID,
        _UIDS,
    )
    mount_dirs: tuple[Path, ...] = ()
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
    files_grace: Annotated[float, Field(ge=0)] = 0.0
    tombstones_kept: Annotated[float, Field(ge=0)] = 30 * 86400.0
    history_max: _Count = 10_000
    memory_reserve: Annotated[int, Field(ge=0)] | None = None

    @property
    def protection(self) -> HostProtection:
        """How host executables of a directory of the host are kept from the code inside."""
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
        """The paths of this runtime, and of every sbx of this user: no sandbox may see them."""
        with_defaults = [*self.private]
        for path_of in (user_data_path, user_config_path):
            with suppress(RuntimeError):  # neither HOME nor an account
                with_defaults.append(path_of("sbx"))
        with_defaults += map(Path, ("/etc/sbx", "/var/lib/sbx", "/var/lib/sbx-environments"))
        with suppress(RuntimeError):  # neither HOME nor an account
            with_defaults.append(default_socket())
        code = (*directories(self.policy_dirs), self.environments)
        in_files = _own_paths_in_files()
        return OwnPaths((*with_defaults, *in_files.private), (*code, *in_files.code))

    @property
    def private(self) -> tuple[Path, ...]:
        """The data and the sockets of this runtime."""
        return (self.data_dir,) if self.data_dir is not None else ()

    def __init__(self, **given: Any) -> None:
        try:
            super().__init__(**given)
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
