"""The settings of an agent: its model and its sandbox.

Sources, in order; the first one that has a setting wins:

    options → environment → --env-file → table [agent] of the user's sbx.toml
        → .env of the working directory

In the environment and in `.env` a setting has its own name, or its name with the prefix SBX_AGENT_,
which wins. In `sbx.toml` the names are in lower case. SBX_CONFIG names another `sbx.toml`.

An agent or the author of a project may have written `.env`. A planted BASE_URL sent conversations
to a server of its author. So only the settings in `IN_WORKING_DIRECTORY` are read from it, those
of the model are ignored, and those of the sandbox are an error: the code would run elsewhere than
the file demands. `--env-file .env` takes all. Even then, a key from another source is never sent to
the BASE_URL of the file.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator

from sbx import settings_files
from sbx.errors import BadRequest, NotFound
from sbx.policy.templates import TEMPLATES, name_pairs, policy_of
from sbx.protocol.addresses import is_host_port, is_local

TABLE = "agent"  # of sbx.toml
_PREFIX = "SBX_AGENT_"
_TEMPLATES = "SBX_TEMPLATES"
# The settings that `.env` of the working directory may set.
IN_WORKING_DIRECTORY = frozenset({"max_steps", "approval_timeout"})
_REFUSED_HERE: Mapping[str, str] = {
    "sandbox_domain": "which service is sent the code and the uploads",
    "sandbox_api_key": "which owner of a service the code and the uploads belong to",
    "sandbox_image": "which policy the sandbox gets, and so which host directories it sees",
}
_SHOULD: Mapping[str, str] = {
    "MODEL_PROVIDER": "`openai`, for everything that speaks chat completions, or `anthropic`",
    "BASE_URL": "the http or https URL of the provider, as https://api.deepseek.com/v1",
    "API_KEY": "the key of the provider, in printable ASCII",
    "MODEL_NAME": "the name of a model, as its provider writes it",
    "MAX_STEPS": "a whole number from 1 to 1000",
    "APPROVAL_TIMEOUT": "seconds, above 0 and at most 86400",
    "SANDBOX_DOMAIN": "the path of a service's socket, its URL, or HOST:PORT of this machine",
    "SANDBOX_API_KEY": "the service's key, in printable ASCII",
    "SANDBOX_IMAGE": "the name of a policy, or an image that the setting templates maps to one",
}


_EXAMPLES = {"MODEL_NAME": " (such as gpt-4o-mini)", "API_KEY": " (such as sk-…)"}


class AgentSettings(BaseModel):
    """The validated values. `read_agent_settings` reads the sources. Times are in seconds.

    Without `sandbox_domain` the sandbox is in this process. Keys are never printed; read them with
    `get_secret_value`. Raise BadRequest `invalid_settings`, which names the setting and its valid
    values.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model_provider: Literal["openai", "anthropic"] = "openai"
    base_url: str | None = None
    api_key: SecretStr | None = None
    model_name: Annotated[str, Field(min_length=1)] | None = None
    max_steps: Annotated[int, Field(ge=1, le=1000)] = 10
    approval_timeout: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    sandbox_domain: str | None = None
    sandbox_api_key: SecretStr | None = None
    sandbox_image: Annotated[str, Field(min_length=1)] = "default"

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            name = str(first["loc"][0]).upper()
            raise _wrong(name, "is wrong", code="invalid_settings") from None

    @field_validator("base_url")
    @classmethod
    def _is_a_url(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError("not a URL")
        return value

    @field_validator("sandbox_domain")
    @classmethod
    def _is_an_address(cls, value: str | None) -> str | None:
        if value is None or not is_host_port(value):
            return value
        if not is_local(value):  # it would receive the key in plain text
            raise ValueError("the scheme is missing")
        return f"http://{value}"

    @field_validator("api_key", "sandbox_api_key")
    @classmethod
    def _fits_a_header(cls, value: SecretStr | None) -> SecretStr | None:
        """Refuse a key that no header can carry: the HTTP client would quote it in its error."""
        if value is not None:
            text = value.get_secret_value()
            if not (text.isascii() and text.isprintable()) or " " in text:
                raise ValueError("not printable ASCII")
        return value

    @property
    def other_server(self) -> str | None:
        """Return the host of the model's server, and its port, if it is not the provider's. Never
        return a password or a key in the address."""
        variable = f"{self.model_provider.upper()}_BASE_URL"  # the SDKs read it
        url = urlsplit(self.base_url or os.environ.get(variable, "").strip())
        if url.hostname is None or url.hostname == f"api.{self.model_provider}.com":
            return None
        return url.hostname if url.port is None else f"{url.hostname}:{url.port}"

    def needed(self, *names: str) -> None:
        """Raise BadRequest `missing_setting` for the first of these settings that is not set."""
        for name in names:
            if getattr(self, name.lower()) is None:
                raise _wrong(name.upper(), "is missing", code="missing_setting")


def read_agent_settings(
    options: Mapping[str, Any] | None = None,
    *,
    config: Path | None = None,
    env_file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> AgentSettings:
    """Return all settings from all sources. `options` are those of the command line; None means
    that an option was not passed. `env_file` is read in place of `.env` of the working directory.

    Raise the errors of AgentSettings, NotFound for a `config` or `env_file` that does not exist,
    Denied `settings_not_private` and `setting_not_allowed_here`.
    """
    environment = os.environ if environment is None else environment
    if config is None and (named := environment.get("SBX_CONFIG")):
        config = Path(named)
    users, ours = _of_toml(config), _of(environment)
    ours |= {name: value for name, value in (options or {}).items() if value is not None}
    file_variables: Mapping[str, str | None] = {}
    if env_file is None:
        in_file: dict[str, Any] = {}
        values = _of_dotenv(directory or Path.cwd()) | users | ours
    else:
        file_variables = settings_files.read_env_file(env_file)
        in_file = _of(file_variables)
        values = users | in_file | ours
    if (options or {}).get("sandbox_image") is None:
        _map_image(values, {**file_variables, **environment}, config)
    _find_provider_key(values, environment)
    is_of_file = {name: name in in_file and name not in ours for name in ("base_url", "api_key")}
    if is_of_file["base_url"] and values.get("api_key") and not is_of_file["api_key"]:
        raise _key_elsewhere()
    return AgentSettings(**values)


def ignored_here(directory: Path | None = None) -> list[str]:
    """Return the names of settings in `.env` of the working directory that are not obeyed."""
    directory = directory or Path.cwd()
    if settings_files.is_config_directory(directory):
        return []
    variables = settings_files.dotenv(settings_files.read_in(directory, ".env") or "")
    ignored = _SHOULD.keys() - {name.upper() for name in IN_WORKING_DIRECTORY}
    return [name for name in variables if name.removeprefix(_PREFIX) in ignored]


def _map_image(
    values: dict[str, Any], variables: Mapping[str, str | None], config: Path | None
) -> None:
    """Replace the name of an image by its policy. `templates` is the setting of the service, and
    other names are policies or their files. Raise BadRequest."""
    image = values.get("sandbox_image")
    if image is None or image.endswith(".toml"):
        return
    file = settings_files.read_users(config)
    of_users = {} if file is None else settings_files.toml(*file)
    try:
        templates = name_pairs(variables.get(_TEMPLATES) or of_users.get("templates", TEMPLATES))
        if image in templates or ":" in image or "/" in image:
            values["sandbox_image"] = policy_of(templates, image)
    except NotFound as error:
        if ":" in image or not Path(image).exists():
            raise _wrong_image(error.message, "add this one, or a pattern for it") from None
    except (ValueError, TypeError, AttributeError):
        hint = "write it as image=policy,image=policy, or as a table in TOML"
        raise _wrong_image("the setting templates is invalid", hint) from None


def _wrong_image(message: str, hint: str) -> BadRequest:
    return BadRequest(
        f"SANDBOX_IMAGE: {message}",
        code="invalid_settings",
        hint=f"{_TEMPLATES} in the environment, or templates in"
        f" {settings_files.config_directory() / settings_files.NAME}, is a table from images to"
        f" policies: {hint}",
        details={"setting": "SANDBOX_IMAGE"},
    )


def _find_provider_key(values: dict[str, Any], environment: Mapping[str, str]) -> None:
    """Without an API_KEY, take the variable that the provider's SDK reads. Another server than the
    provider's never gets it."""
    if "api_key" not in values and "base_url" not in values:
        variable = f"{values.get('model_provider', 'openai').upper()}_API_KEY"
        if key := environment.get(variable, "").strip():
            values["api_key"] = key


def _of(source: Mapping[str, str | None]) -> dict[str, Any]:
    """Return the settings in this source. An empty value counts as not set."""
    texts = {name: source.get(_PREFIX + name) or source.get(name) for name in _SHOULD}
    texts["SANDBOX_API_KEY"] = texts["SANDBOX_API_KEY"] or source.get("SBX_KEY")
    return {name.lower(): text.strip() for name, text in texts.items() if text and text.strip()}


def _of_toml(config: Path | None) -> dict[str, Any]:
    file = settings_files.read_users(config)
    if file is None:
        return {}
    path = file[0]
    values = settings_files.toml(*file).get(TABLE, {})
    if not isinstance(values, dict):
        raise BadRequest(
            f"{path} has a setting {TABLE} that is not a table",
            code="invalid_settings",
            hint=f"write [{TABLE}] on a separate line, and the settings below it",
            details={"setting": TABLE, "source": str(path)},
        )
    for name in values.keys() - AgentSettings.model_fields.keys():
        raise BadRequest(
            f"{path} has an unknown setting {name!r} in [{TABLE}]",
            code="invalid_settings",
            hint=f"there are {', '.join(AgentSettings.model_fields)}",
            details={"setting": name, "source": str(path)},
        )
    return values


def _of_dotenv(directory: Path) -> dict[str, Any]:
    values = _of(settings_files.dotenv(settings_files.read_in(directory, ".env") or ""))
    if settings_files.is_config_directory(directory):
        return values
    for name in values:
        if (decision := _REFUSED_HERE.get(name)) is not None:
            variable = name.upper()
            raise settings_files.not_allowed_here(
                directory / ".env",
                variable,
                variable,
                decision,
                f"set {_PREFIX}{variable} in the environment, or {name} in the table [{TABLE}] of"
                f" {settings_files.config_directory() / settings_files.NAME}, or take the whole"
                " file with --env-file .env",
            )
    return {name: value for name, value in values.items() if name in IN_WORKING_DIRECTORY}


def _key_elsewhere() -> BadRequest:
    return BadRequest(
        "BASE_URL is from --env-file and API_KEY is not: the author of that file would receive the"
        " key",
        code="invalid_settings",
        hint="set BASE_URL where API_KEY is set, or both in the file",
        details={"setting": "BASE_URL"},
    )


def _wrong(name: str, what: str, *, code: str) -> BadRequest:
    return BadRequest(
        f"the setting {name} {what}: it should be {_SHOULD.get(name, 'left out, it is unknown')}",
        code=code,
        hint=f"set {name}{_EXAMPLES.get(name, '')} or {_PREFIX}{name} in the environment, or"
        f" {name.lower()} in the table"
        f" [{TABLE}] of {settings_files.config_directory() / settings_files.NAME}",
        details={"setting": name},
    )
