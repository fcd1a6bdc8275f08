"""Which model an agent asks, and which sandbox it works in.

Each setting is read from the environment, then from `.env` in the working directory; by its own
name, or with SBX_AGENT_ before it, which wins. An agent may have written that file, or who made the
project it lies in: what it names is never sent a key that it does not hold itself.
"""

import os
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, Literal

from dotenv import dotenv_values
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator

from sbx.errors import BadRequest, Denied

_PREFIX = "SBX_AGENT_"
_SENT_TO = {"api_key": "base_url", "sandbox_api_key": "sandbox_domain"}
_SHOULD: Mapping[str, str] = {
    "MODEL_PROVIDER": "`openai`, for everything that speaks chat completions, or `anthropic`",
    "BASE_URL": "the http or https URL of the provider, as https://api.deepseek.com/v1",
    "API_KEY": "the provider's key, in printable ASCII",
    "MODEL_NAME": "the name of a model, as its provider writes it",
    "MAX_STEPS": "a whole number from 1 to 1000",
    "APPROVAL_TIMEOUT": "seconds, above 0 and at most 86400",
    "SANDBOX_DOMAIN": "the path of a service's socket, or its URL",
    "SANDBOX_API_KEY": "the service's key, in printable ASCII",
    "SANDBOX_IMAGE": "the name of a policy",
}


class AgentSettings(BaseModel):
    """Made from values alone; `read_agent_settings` looks at the sources. Times in seconds.

    Without `sandbox_domain` the sandbox is in this process. Keys show nowhere: `get_secret_value`.
    Raises BadRequest `invalid_settings`, naming the setting and what it should be.
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
        """What no header can carry would be quoted by the error of whoever tries."""
        if value is not None:
            text = value.get_secret_value()
            if not (text.isascii() and text.isprintable()) or " " in text:
                raise ValueError("not printable ASCII")
        return value

    def needed(self, *names: str) -> None:
        """Raises BadRequest `missing_setting` for the first of these that is not set."""
        for name in names:
            if getattr(self, name.lower()) is None:
                raise _wrong(name.upper(), "is missing", code="missing_setting")


def read_agent_settings(
    given: Mapping[str, Any] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> AgentSettings:
    """All settings; `given`, as of a command line, goes before both sources, and None in it is not
    given. Raises as AgentSettings does, and Denied `setting_not_allowed_here`."""
    in_file = _of(_dotenv((directory or Path.cwd()) / ".env"))
    ours = _of(os.environ if environment is None else environment)
    ours |= {name: value for name, value in (given or {}).items() if value is not None}
    for key, place in _SENT_TO.items():
        if key in ours and place in in_file and place not in ours:
            raise _key_elsewhere(key.upper(), place.upper())
    chosen = in_file | ours
    # Without a key of the agent's own, the client of the service takes this one.
    client_key = (os.environ if environment is None else environment).get("SBX_API_KEY")
    domain_in_file = "sandbox_domain" in in_file and "sandbox_domain" not in ours
    if client_key and domain_in_file and "sandbox_api_key" not in chosen:
        raise _key_elsewhere("SBX_API_KEY", "SANDBOX_DOMAIN")
    if "sandbox_image" in in_file and "sandbox_image" not in ours:
        _refuse_policy_file(in_file["sandbox_image"])
    return AgentSettings(**chosen)


def _of(source: Mapping[str, str | None]) -> dict[str, Any]:
    """The settings in it; what is empty is not given."""
    found = {name: source.get(_PREFIX + name) or source.get(name) for name in _SHOULD}
    return {name.lower(): text.strip() for name, text in found.items() if text and text.strip()}


def _dotenv(path: Path) -> Mapping[str, str | None]:
    try:
        text = path.read_text()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"{path} cannot be read: {error}", code="invalid_settings") from error
    return dotenv_values(stream=StringIO(text), interpolate=False)


def _key_elsewhere(key: str, place: str) -> BadRequest:
    return BadRequest(
        f"{place} is from .env and {key} is not: who wrote that file would be sent the key",
        code="invalid_settings",
        hint=f"set {place} where {key} is set, or both in .env",
        details={"setting": place},
    )


def _refuse_policy_file(image: str) -> None:
    """Raise Denied for a policy file that `.env` names. The author of `.env` could write that file
    too, and mount any host directory by it. A name is looked up among the user's policies."""
    if "/" in image or image.endswith(".toml"):
        raise Denied(
            f".env may not set SANDBOX_IMAGE to a policy file, {image!r}: this would decide which"
            " host directories the sandbox sees",
            code="setting_not_allowed_here",
            hint="name an installed policy, or set SBX_AGENT_SANDBOX_IMAGE in the environment",
            details={"setting": "SANDBOX_IMAGE"},
        )


def _wrong(name: str, what: str, *, code: str) -> BadRequest:
    return BadRequest(
        f"the setting {name} {what}: it should be {_SHOULD.get(name, 'left out, it is unknown')}",
        code=code,
        hint=f"set {name} or {_PREFIX}{name}, in the environment or in .env",
        details={"setting": name},
    )
