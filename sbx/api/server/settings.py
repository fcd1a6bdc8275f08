"""The settings of a service, and the source of each value.

Of these sources, the first one with a value decides:

    command line → environment (SBX_*) → --env-file → the user's sbx.toml
        → .env, then sbx.toml of the working directory → default

The user's `sbx.toml` is in the user's configuration directory (/etc/sbx for root). `--config` or
SBX_CONFIG names another file, which replaces both. Only the service reads these files (except for
`Settings.own_paths`): a program that embeds sbx does not depend on its working directory.

The working directory may be a project: code in a sandbox, or the author of a repository, can write
its files, also those of root, since a project of root may be mapped. So these files come last, and
may set only `IN_WORKING_DIRECTORY`. They raise only limits that the user does not set. With
`--env-file`, which may set all, `.env` is not read.
"""

import json
import os
from collections import ChainMap
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from msgspec import Struct
from platformdirs import user_data_path
from pydantic import (
    BeforeValidator,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource

from sbx import settings_files
from sbx.agent.settings import TABLE as AGENT_TABLE
from sbx.agent.settings import AgentSettings
from sbx.api.console.settings import ConsoleSettings, address, origin
from sbx.errors import BadRequest
from sbx.policy.templates import TEMPLATES, name_pairs
from sbx.service.session_rules import TYPES

PREFIX = "SBX_"
_OTHER_NAMES = {"api_key": ("BAY_API_KEY",)}
_NO_SETTINGS = {  # variables of sbx that are not among these settings
    "SBX_DEBUG",
    "SBX_CONFIG",
    *(f"SBX_AGENT_{name.upper()}" for name in AgentSettings.model_fields),
}

# The settings that a file of the working directory may set: limits, times and logging.
IN_WORKING_DIRECTORY = frozenset(
    {
        *("zygotes_max", "start_timeout", "interrupt_grace", "memory_reserve", "sandboxes_max"),
        *("sandboxes_per_owner", "workspaces_per_owner", "kernels_max", "kernels_per_owner"),
        *("queue_max", "idle_timeout", "gc_interval", "files_grace", "log_format", "log_level"),
        *("drain_timeout", "connections_max", "uploads_at_once", "uploads_per_owner"),
        *("downloads_per_owner", "followers_per_owner", "streams_per_owner", "bodies_per_owner"),
        *("sessions_ttl", "sessions_upload_size", "sessions_upload_count"),
        "sessions_upload_types",
    }
)
# The decisions that the author of such a file would make by the others.
_DECISIONS: Mapping[str, str] = {
    "bwrap": "which program the service executes on the host",
    "environments": "which interpreters sbx executes and mounts",
    "policy_dirs": "which policies sandboxes get, and so which host directories they see",
    "policy_aliases": "which policy a name means",
    "agents_dir": "which instructions, tools and approvals agents have",
    "tools_dir": "which programs and servers of others agents call",
    "tasks_dir": "which prompts and checks tasks have",
    "templates": "which policy an image or template of another SDK gets",
    "sessions_policy": "which policy the sandboxes of sessions get",
    "mount_dirs": "which host directories clients may mount",
    "project_dirs": "which host directories clients may open as projects",
    "project_owners": "whose directories the service maps for projects",
    "host_executables_add": "which names of a project are protected",
    "host_executables_remove": "which names of a project are not protected",
    "allow_host_mode": "whether models may act on the host without a sandbox",
    "fast_path": "how kernels are started",
    "cgroups": "whether Linux limits the memory and the processes of sandboxes",
    "disk_quota": "whether Linux limits the disk space of sandboxes",
    "uid_range": "which host users the code in sandboxes runs as",
    "user": "which account the service runs as",
    "data_dir": "where keys, records and the audit log are, and which keys are valid",
    "socket": "where clients reach the service; code inside could connect to it there",
    "socket_group": "which users may connect",
    "socket_mode": "which users may connect",
    "listen": "on which network address the service can be reached",
    "console": "on which network address the console can be reached",
    "console_socket": "whether the service has a socket for the console",
    "console_url": "which web page may use the service as a logged-in user",
    "console_frames_url": "which web page shows output that is not trusted",
    "api_key": "which key gives the operator's rights",
    "cors_origins": "which web pages may call the service",
    "audit_size_max": "how the audit log is divided into files",
    "audit_rotation": "how the audit log is divided into files",
    "history_max": "how much of the record of a sandbox is kept",
    "tombstones_kept": "how long the record of a sandbox is kept",
}


def _octal(value: Any) -> Any:
    """Convert a mode such as `0660`. In TOML, 0o660 is a number already."""
    return int(value, 8) if isinstance(value, str) else value


def _default_data_dir() -> Path:
    return Path("/var/lib/sbx") if os.geteuid() == 0 else user_data_path("sbx")


_Mode = Annotated[int, Field(ge=0, le=0o777)]
_OWN_PATHS = ("socket", "data_dir", "environments", "agents_dir", "tools_dir", "tasks_dir")


class ServiceSettings(ConsoleSettings):
    """The settings of `sbx serve`: those of a runtime, and those of the service around it.

    Durations in seconds, sizes in bytes. `user`: as root, the account (or `uid`, `uid:gid`) of the
    process that parses HTTP; None is the account `sbx` if it exists, else the uid below
    `uid_range`. `connections_max`: at once over TCP, and as many on the Unix socket, or fewer.
    `*_per_owner`: at once, for the key and all tokens of one owner; bodies in bytes. `sessions_*`:
    the defaults of a session of /api/v1. `templates`: the policy of each image or
    template of the SDK of another product, by name or pattern; `*` is every other one.
    The constructor takes values only; `read_settings` reads the sources.
    """

    data_dir: Path | None = Field(default_factory=_default_data_dir)
    socket_group: str | None = None
    socket_mode: Annotated[_Mode | None, BeforeValidator(_octal)] = None
    listen: str | None = None
    user: str | None = None
    api_key: SecretStr | None = None
    cors_origins: tuple[str, ...] = ()
    log_format: Literal["auto", "console", "json"] = "auto"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    drain_timeout: Annotated[float, Field(ge=0, le=3600)] = 30.0
    connections_max: Annotated[int, Field(ge=1, le=100_000)] = 1000
    uploads_at_once: Annotated[int, Field(ge=1, le=10_000)] = 8
    uploads_per_owner: Annotated[int, Field(ge=1, le=10_000)] = 2
    downloads_per_owner: Annotated[int, Field(ge=1, le=10_000)] = 64
    followers_per_owner: Annotated[int, Field(ge=1, le=10_000)] = 50
    streams_per_owner: Annotated[int, Field(ge=1, le=10_000)] = 100
    bodies_per_owner: Annotated[int, Field(ge=16 << 20, le=1 << 40)] = 128 << 20
    templates: Annotated[Mapping[str, str], NoDecode, BeforeValidator(name_pairs)] = TEMPLATES
    sessions_policy: str = "default"
    sessions_ttl: Annotated[int, Field(ge=1)] = 7200
    sessions_upload_size: Annotated[int, Field(ge=1)] = 100 << 20
    sessions_upload_count: Annotated[int, Field(ge=1)] = 50
    sessions_upload_types: tuple[str, ...] = TYPES

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)

    @field_validator("listen")
    @classmethod
    def _is_an_address(cls, value: str | None) -> str | None:
        if value is not None:
            address(value)
        return value

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(origin, value))

    @model_validator(mode="after")
    def _paths_are_absolute(self) -> Self:
        """Resolve paths against the working directory now, so that later nothing depends on it."""
        for name in _OWN_PATHS:
            if (path := getattr(self, name)) is not None:
                object.__setattr__(self, name, Path(os.path.abspath(path.expanduser())))
        for name in ("mount_dirs", "policy_dirs", "project_dirs"):
            absolute = (Path(os.path.abspath(path.expanduser())) for path in getattr(self, name))
            object.__setattr__(self, name, tuple(absolute))
        return self

    @property
    def data(self) -> Path:
        """Return the data directory, which a service always has."""
        assert self.data_dir is not None
        return self.data_dir

    @property
    def projects_data(self) -> Path:
        """Return the directory of the project server, if root started the service. It has copies of
        projects and its quarantine, and the service cannot write there."""
        return self.data.with_name(f"{self.data.name}-projects")

    @property
    def private(self) -> tuple[Path, ...]:
        """Return the data and the socket. A user of the socket with its uid is the operator."""
        return (self.data, self.projects_data, self.socket, *filter(None, (self.console_path,)))

    @property
    def credentials_path(self) -> Path:
        """Return the file of the first key, with mode 0600."""
        return self.data / "credentials.json"


class LoadedSettings(Struct, frozen=True):
    """Settings, and the source of each one that is not a default.

    `unknown` are names that look like settings of sbx but are not, with their source.
    """

    settings: ServiceSettings
    sources: Mapping[str, str]
    unknown: tuple[tuple[str, str], ...] = ()


def read_settings(
    options: Mapping[str, Any] | None = None,
    *,
    config: Path | None = None,
    env_file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> LoadedSettings:
    """Return all settings from all sources. `options` is the command line; None values are unset.

    Raise BadRequest `invalid_settings` with the setting and its source; NotFound for a missing
    `config` or `env_file`; Denied `settings_not_private` for a file that others can write, and
    `setting_not_allowed_here` for a setting in a file of the working directory that is not in
    IN_WORKING_DIRECTORY.
    """
    environment = os.environ if environment is None else environment
    directory = directory or Path.cwd()
    if config is None and (path := environment.get("SBX_CONFIG")):
        config = Path(path)
    set_options = {name: value for name, value in (options or {}).items() if value is not None}
    layers = [
        _Layer("the command line", set_options),
        _Layer("the environment", *_of_variables(environment)),
    ]
    users = _of_users_toml(config)
    if env_file is None:
        file = directory / ".env"
        dotenv = settings_files.dotenv(settings_files.read_in(directory, file.name) or "")
        layers += [*users, *_of_dotenv(file, dotenv)]
    else:
        file, dotenv = env_file, settings_files.read_env_file(env_file)
        layers += [_Layer(str(file), *_of_variables(dotenv)), *users]
    if config is None and not settings_files.is_config_directory(directory):
        layers += _of_toml_here(directory)
    values = ChainMap(*(layer.values for layer in layers))
    sources = {name: _origin(name, layers) for name in values}
    settings = _validated(values, sources)
    unknown = [*_unknown(environment, "the environment"), *_unknown(dotenv, str(file))]
    return LoadedSettings(settings, sources, tuple(sorted(unknown)))


class _Layer(NamedTuple):
    """The values of one source. `variables` are the names of environment variables in it."""

    source: str
    values: dict[str, Any]
    variables: Mapping[str, str] = {}


def _origin(name: str, layers: Sequence[_Layer]) -> str:
    """Return the first source that sets `name`."""
    layer = next(layer for layer in layers if name in layer.values)
    variable = layer.variables.get(name)
    return layer.source if variable is None else f"{layer.source} ({variable})"


def _validated(values: Mapping[str, Any], sources: Mapping[str, str]) -> ServiceSettings:
    try:
        return ServiceSettings(**values)
    except BadRequest as error:
        cause = error.__context__
        if not isinstance(cause, ValidationError):
            raise
        first = cause.errors(include_url=False, include_input=False)[0]
        name = str(first["loc"][0]) if first["loc"] else "?"
        source = sources.get(name, "its default")
        problem = first["msg"].removeprefix("Value error, ")
        raise BadRequest(
            f"the setting {name} of {source} is wrong: {problem}",
            code="invalid_settings",
            hint="`sbx config` shows every setting and its source",
            details={"setting": name, "source": source},
        ) from None


def _of_variables(variables: Mapping[str, str | None]) -> tuple[dict[str, Any], dict[str, str]]:
    values, names = {}, {}
    for field in ServiceSettings.model_fields:
        for variable in variables_of(field):
            if text := variables.get(variable):  # an empty variable is unset
                values[field], names[field] = parsed(field, text), variable
                break
    return values, names


def variables_of(field: str) -> tuple[str, ...]:
    return (f"{PREFIX}{field.upper()}", *_OTHER_NAMES.get(field, ()))


def parsed(field: str, text: str) -> Any:
    """Return the value of a variable. A list is JSON, or has commas."""
    if field == "policy_dirs" or "tuple" not in str(ServiceSettings.model_fields[field].annotation):
        return text  # its own validator splits the directories
    if text.lstrip().startswith("["):
        try:
            return json.loads(text)
        except ValueError:
            return text  # the validation refuses it, with the name of the setting
    return text.split(",")


def _of_users_toml(config: Path | None) -> list[_Layer]:
    file = settings_files.read_users(config)
    return [] if file is None else [_Layer(str(file[0]), _of_toml(*file))]


def _of_dotenv(path: Path, variables: Mapping[str, str | None]) -> list[_Layer]:
    values, names = _of_variables(variables)
    if not settings_files.is_config_directory(path.parent):
        _refuse_settings_here(path, values, names)
    return [_Layer(str(path), values, names)]


def _of_toml_here(directory: Path) -> list[_Layer]:
    path = directory / settings_files.NAME
    if (text := settings_files.read_in(directory, path.name)) is None:
        return []
    values = _of_toml(path, text, in_working_directory=True)
    _refuse_settings_here(path, values, {})
    return [_Layer(str(path), values)]


def _of_toml(path: Path, text: str, *, in_working_directory: bool = False) -> dict[str, Any]:
    values = settings_files.toml(path, text)
    if values.pop(AGENT_TABLE, None) is not None and in_working_directory:
        raise settings_files.not_allowed_here(
            path,
            AGENT_TABLE,
            f"[{AGENT_TABLE}]",
            "which model an agent asks, and in which sandbox it works",
            f"put the table in {settings_files.config_directory() / settings_files.NAME}",
        )
    if "policies" in values:
        values.setdefault("policy_dirs", values.pop("policies"))
    for name in values.keys() - ServiceSettings.model_fields.keys():
        raise BadRequest(
            f"{path} names the setting {name}, which does not exist",
            code="invalid_settings",
            hint=_nearest(name, list(ServiceSettings.model_fields)),
            details={"setting": name, "source": str(path)},
        )
    return values


def _refuse_settings_here(path: Path, values: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Raise Denied for the first setting that a file of the working directory may not set."""
    for name in values:
        if name not in IN_WORKING_DIRECTORY:
            raise settings_files.not_allowed_here(
                path,
                name,
                names.get(name, name),
                _DECISIONS.get(name, "more than a limit"),
                f"set it in {settings_files.config_directory() / settings_files.NAME} or in the"
                f" environment ({variables_of(name)[0]}), or name the file: a TOML file with"
                " --config (SBX_CONFIG), another one with --env-file",
            )


def _unknown(variables: Mapping[str, Any], source: str) -> list[tuple[str, str]]:
    """Return variables with our prefix that are not settings: probably typos."""
    settings = {v for field in ServiceSettings.model_fields for v in variables_of(field)}
    return [
        (name, source)
        for name in variables
        if name.startswith(PREFIX) and name not in settings | _NO_SETTINGS
    ]


def _nearest(name: str, names: list[str]) -> str:
    near = get_close_matches(name, names, 1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
