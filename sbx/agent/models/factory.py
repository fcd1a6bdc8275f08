"""Create the configured model."""

from collections.abc import Mapping
from typing import Any

from sbx.agent.models import Model
from sbx.agent.models.anthropic import AnthropicModel
from sbx.agent.models.openai import OpenAIModel
from sbx.agent.models.sdk_model import SdkModel
from sbx.agent.settings import AgentSettings

_KINDS: Mapping[str, type[SdkModel]] = {"openai": OpenAIModel, "anthropic": AnthropicModel}
_NO_KEY = "no-key-is-needed"  # Ollama and vLLM need no key, but the SDKs require one


def sdk_of(settings: AgentSettings) -> str:
    """Return the module of the provider's SDK, whose import takes about a second."""
    return _KINDS[settings.model_provider].sdk


def make_model(
    settings: AgentSettings, name: str | None = None, options: Mapping[str, Any] | None = None
) -> Model:
    """Return the configured model, or another model of its provider. The caller must close it. The
    first model of a provider takes about a second, because its SDK is imported. `options`: see
    SdkModel.

    Raise BadRequest `missing_setting`, `invalid_settings`; Unavailable `extra_missing`.
    """
    if name is None:
        settings.needed("MODEL_NAME")
    if settings.base_url is None:
        settings.needed("API_KEY")
    key = settings.api_key.get_secret_value() if settings.api_key else _NO_KEY
    kind = _KINDS[settings.model_provider]
    name = name or settings.model_name or ""
    return kind(name, api_key=key, base_url=settings.base_url, options=options)
