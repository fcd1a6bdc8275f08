"""A model whose answers are written to a file when it is closed."""

from pathlib import Path

from sbx.agent.models import Model
from sbx.agent.models.replay import Recorder
from sbx.errors import BadRequest


class ChatRecording(Recorder):
    def __init__(self, model: Model, path: Path) -> None:
        """Raise BadRequest for a path that cannot be written, before the first request."""
        super().__init__(model)
        self._path = path
        self._write()

    async def close(self) -> None:
        self._write()
        await super().close()

    def _write(self) -> None:
        try:
            self.save(self._path)
        except OSError as error:
            raise BadRequest(
                f"{self._path} cannot be written: {error.strerror}",
                hint="name a file that you can write for --record",
            ) from error
