"""The models of the agents of a service."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from sbx.agent.models import Model
from sbx.agent.models.factory import make_model, sdk_of
from sbx.agent.settings import AgentSettings
from sbx.errors import SbxError, Unavailable
from sbx.imports import import_in_thread

_SETTING_NAMES = "MODEL_PROVIDER, BASE_URL, API_KEY and MODEL_NAME"


class ModelSource:
    """The models of the configured provider, by name.

    `settings`: the settings, or the error that explains why they cannot be used.
    """

    def __init__(self, settings: AgentSettings | SbxError | None) -> None:
        self._settings = settings
        self._default: Model | None = None
        self._creating = asyncio.Lock()

    @property
    def settings(self) -> AgentSettings:
        """Raise Unavailable `model_not_configured`, which names the missing or wrong setting."""
        try:
            if isinstance(self._settings, SbxError):
                raise self._settings
            settings = self._settings or AgentSettings()
            settings.needed("MODEL_NAME", *(() if settings.base_url else ("API_KEY",)))
        except SbxError as error:
            raise Unavailable(
                f"no model is configured here: {error.message}",
                code="model_not_configured",
                hint=f"the operator sets {_SETTING_NAMES} in the service's environment or .env",
                details=error.details,
            ) from None
        return settings

    @asynccontextmanager
    async def model(
        self, name: str | None, options: Mapping[str, Any] | None = None
    ) -> AsyncIterator[Model]:
        """Yield the model with this name, or the configured one. Raise Unavailable
        `model_not_configured` and `extra_missing`."""
        if name in (None, self.settings.model_name) and not options:
            yield await self._configured()
            return
        model = await self._create(name, options)
        try:
            yield model
        finally:
            await model.close()

    async def close(self) -> None:
        default, self._default = self._default, None
        if default is not None:
            await default.close()

    async def _configured(self) -> Model:
        async with self._creating:
            if self._default is None:
                self._default = await self._create(None)
            return self._default

    async def _create(self, name: str | None, options: Mapping[str, Any] | None = None) -> Model:
        with suppress(ImportError):  # `make_model` reports it
            await import_in_thread(sdk_of(self.settings))
        return await asyncio.to_thread(make_model, self.settings, name, options)
