"""The settings of an agent: its model and its sandbox.

Sources, in order; the first one that has a setting wins:

    options → environment → table [agent] of the user's sbx.toml → .env of the working directory

In the environment and in `.env` a setting has its own name, or its name with the prefix SBX_AGENT_,
which wins. In `sbx.toml` the names are in lower case. SBX_CONFIG names another `sbx.toml`.

An agent or the author of a project may have written `.env`. So `.env` must not contain the settings
in `NOT_IN_WORKING_DIRECTORY`, and a key from another source is never sent to its BASE_URL.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator

from sbx import settings_files
from sbx.errors import BadRequest

TABLE = "agent"  # of sbx.toml
_PREFIX = "SBX_AGENT_"
# Settings that `.env` of the working directory may not set, each with the reason: the author of the
# file would decide this. tests/unit/test_agent_parts.py lists the others, so that each new setting
# needs a decision.
NOT_IN_WORKING_DIRECTORY: Mapping[str, str] = {
    "model_provider": "which provider is sent the key of the environment",
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
    "SANDBOX_DOMAIN": "the path of a service's socket, or its URL",
    "SANDBOX_API_KEY": "the service's key, in printable ASCII",
    "SANDBOX_IMAGE": "the name of a policy",
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

    @field_validator("api_key", "sandbox_api_key")
    @classmethod
    def _fits_a_header(cls, value: SecretStr | None) -> SecretStr | None:
        """Refuse a key that no header can carry: the HTTP client would quote it in its error."""
        if value is not None:
            text = value.get_secret_value()
            if not (text.isascii() and text.isprintable()) or " " in text:
                raise ValueError("not printable ASCII")
        return value

    def needed(self, *names: str) -> None:
        """Raise BadRequest `missing_setting` for the first of these settings that is not set."""
        for name in names:
            if getattr(self, name.lower()) is None:
                raise _wrong(name.upper(), "is missing", code="missing_setting")


def read_agent_settings(
    options: Mapping[str, Any] | None = None,
    *,
    config: Path | None = None,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> AgentSettings:
    """Return all settings from all sources. `options` are those of the command line; None means
    that an option was not passed.

    Raise the errors of AgentSettings, NotFound for a `config` that does not exist, Denied
    `settings_not_private` and `setting_not_allowed_here`.
    """
    environment = os.environ if environment is None else environment
    if config is None and (named := environment.get("SBX_CONFIG")):
        config = Path(named)
    in_file = _of_dotenv(directory or Path.cwd())
    ours = _of_toml(config) | _of(environment)
    ours |= {name: value for name, value in (options or {}).items() if value is not None}
    _find_provider_key(ours, in_file, environment)
    if "api_key" in ours and "base_url" in in_file and "base_url" not in ours:
        raise _key_elsewhere()
    return AgentSettings(**(in_file | ours))


def _find_provider_key(
    ours: dict[str, Any], in_file: Mapping[str, Any], environment: Mapping[str, str]
) -> None:
    """Without an API_KEY, take the variable that the provider's SDK reads. Another server than the
    provider's never gets it."""
    values = {**in_file, **ours}
    if "api_key" not in values and "base_url" not in values:
        variable = f"{values.get('model_provider', 'openai').upper()}_API_KEY"
        if key := environment.get(variable, "").strip():
            ours["api_key"] = key


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
        if (decision := NOT_IN_WORKING_DIRECTORY.get(name)) is not None:
            variable = name.upper()
            raise settings_files.not_allowed_here(
                directory / ".env",
                variable,
                variable,
                decision,
                f"set {_PREFIX}{variable} in the environment, or {name} in the table [{TABLE}] of"
                f" {settings_files.config_directory() / settings_files.NAME}",
            )
    return values


def _key_elsewhere() -> BadRequest:
    return BadRequest(
        "BASE_URL is from .env and API_KEY is not: the author of that file would receive the key",
        code="invalid_settings",
        hint="set BASE_URL where API_KEY is set, or both in .env",
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
