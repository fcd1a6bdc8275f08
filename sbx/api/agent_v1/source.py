"""The models that the operator configured."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sbx.agent.models import Model
from sbx.agent.models.factory import make_model
from sbx.agent.settings import AgentSettings
from sbx.errors import SbxError, Unavailable

_NAMES = "MODEL_PROVIDER, BASE_URL, API_KEY and MODEL_NAME"


class ModelSource:
    """Models by their names at the configured provider. `settings`: an error where there are none
    that would do, which says what is missing."""

    def __init__(self, settings: AgentSettings | SbxError | None) -> None:
        self._settings = settings
        self._default: Model | None = None
        self._making = asyncio.Lock()

    @property
    def settings(self) -> AgentSettings:
        """Raises Unavailable `model_not_configured`, which names what is missing or wrong."""
        try:
            if isinstance(self._settings, SbxError):
                raise self._settings
            settings = self._settings or AgentSettings()
            settings.needed("MODEL_NAME", *(() if settings.base_url else ("API_KEY",)))
        except SbxError as error:
            raise Unavailable(
                f"no model is configured here: {error.message}",
                code="model_not_configured",
                hint=f"the operator sets {_NAMES} in the service's environment or .env",
                details=error.details,
            ) from None
        return settings

    @asynccontextmanager
    async def model(self, name: str | None) -> AsyncIterator[Model]:
        """The model of this name, None being the configured one. Raises Unavailable
        `model_not_configured` and `extra_missing`."""
        if name is None or name == self.settings.model_name:
            yield await self._configured()
            return
        model = await self._made(name)
        try:
            yield model
        finally:
            await model.close()

    async def close(self) -> None:
        default, self._default = self._default, None
        if default is not None:
            await default.close()

    async def _configured(self) -> Model:
        async with self._making:
            if self._default is None:
                self._default = await self._made(None)
            return self._default

    async def _made(self, name: str | None) -> Model:
        # In a thread: the import of a provider's SDK takes most of a second.
        return await asyncio.to_thread(make_model, self.settings, name)
