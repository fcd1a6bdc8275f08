"""A model whose answers are written down when it is closed."""

from pathlib import Path

from sbx.agent.models import Model
from sbx.agent.models.replay import Recorder
from sbx.errors import BadRequest


class Recording(Recorder):
    def __init__(self, model: Model, path: Path) -> None:
        """Raises BadRequest for a path that cannot be written, before anything is asked."""
        super().__init__(model)
        self._path = path
        self._written()

    async def close(self) -> None:
        self._written()
        await super().close()

    def _written(self) -> None:
        try:
            self.save(self._path)
        except OSError as error:
            raise BadRequest(
                f"{self._path} cannot be written: {error.strerror}",
                hint="name a file that you can write for --record",
            ) from error
