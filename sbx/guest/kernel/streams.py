"""`sys.stdout` and `sys.stderr` of a kernel, with the attributes that those of CPython have."""

import io
import sys
from typing import Any, Self

from sbx.guest.kernel.output import DESCRIPTORS, OutputWriter, StreamName


class TextStream(io.TextIOBase):
    """sys.stdout or sys.stderr of a kernel. It never closes: later cells have to print as well."""

    errors = "backslashreplace"
    mode = "w"
    line_buffering = True
    write_through = False

    def __init__(self, name: StreamName, output: OutputWriter) -> None:
        super().__init__()
        self.name = f"<{name}>"
        self._stream: StreamName = name
        self._output = output

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    @property
    def buffer(self) -> "ByteStream":
        return ByteStream(self._stream, self._output)

    def detach(self) -> "ByteStream":  # type: ignore[override]
        """Return the buffer, and remain usable."""
        return self.buffer

    def write(self, text: str, /) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if text:
            self._output.write(self._stream, text)
        return len(text)

    def flush(self) -> None:
        self._output.flush()

    def close(self) -> None:
        """Flush only."""
        self.flush()

    def reconfigure(self, **_options: Any) -> None:
        """Accept options of programs that set an encoding; frames are always UTF-8."""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return DESCRIPTORS[self._stream]


class ByteStream(io.BufferedIOBase):
    """`sys.stdout.buffer`: accepts bytes as UTF-8."""

    mode = "wb"

    def __init__(self, name: StreamName, output: OutputWriter) -> None:
        super().__init__()
        self.name = f"<{name}>"
        self._stream: StreamName = name
        self._output = output

    @property
    def raw(self) -> Self:
        return self

    def write(self, data: Any, /) -> int:
        data = bytes(data)
        self._output.write_bytes(self._stream, data)
        return len(data)

    def flush(self) -> None:
        self._output.flush()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return DESCRIPTORS[self._stream]


def replace(output: OutputWriter) -> None:
    """Replace sys.stdout and sys.stderr of this process."""
    sys.stdout = TextStream("stdout", output)
    sys.stderr = TextStream("stderr", output)
