"""The values that a cell shows: within their limits, and as frames.

`FrameDisplayHook` and `FrameDisplayPublisher` replace those of ipykernel.
"""

# IPython is typed only in part; only our side of it is checked here.
# mypy: disable-error-code="misc,call-arg,no-untyped-call,union-attr,no-any-return,arg-type"
# mypy: disable-error-code="var-annotated,index"

import sys
from collections.abc import Mapping
from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.payload import PayloadManager

from sbx.guest import frames

_TEXT_KEPT = 256 * 1024  # characters that remain of a text that was too large
_SOURCE_MAX = 80  # characters


def bounded(data: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """Return `data`, a bundle by MIME type, within `limit` bytes.

    A note in text/plain replaces the largest parts, and JSON that is larger than the host accepts.
    text/plain itself is cut instead of dropped. Raise FrameError for data that cannot be sent.
    """
    if len(data) > frames.MAX_PARTS:
        raise frames.FrameError(f"{len(data)} formats at once: the limit is {frames.MAX_PARTS}")
    measured = {mime: _measure(value) for mime, value in data.items()}
    sizes = {mime: size for mime, (size, _) in measured.items()}
    kept = dict(data)
    notes = []
    for mime in sorted(sizes, key=sizes.__getitem__, reverse=True):
        values = sum(measured[name][1] for name in kept)
        too_much_json = not isinstance(data[mime], (str, bytes)) and (
            sizes[mime] > frames.MAX_JSON or values > frames.MAX_VALUES
        )
        if sum(sizes[name] for name in kept) <= limit and not too_much_json:
            continue
        if mime == "text/plain":
            kept[mime], sizes[mime] = cut(str(kept[mime]), min(_TEXT_KEPT, limit)), 0
        else:
            del kept[mime]
            notes.append(f"[{mime} of {sizes[mime]} bytes is not shown: too large]")
    if notes:
        kept["text/plain"] = "\n".join([*notes, str(kept.get("text/plain", ""))]).rstrip()
    return kept


def _cut_note(data: Mapping[str, Any], shown: Mapping[str, Any]) -> dict[str, bool]:
    """Return the marker of a frame whose `data` is not complete, or nothing."""
    is_complete = all(shown.get(mime) is part for mime, part in data.items())
    return {} if is_complete else {"cut": True}


def cut(text: str, length: int) -> str:
    """Return `text`, or its first `length` characters and a note with the full length."""
    if len(text) <= length:
        return text
    return f"{text[:length]}\n… [cut: {len(text)} characters in all]"


def _measure(value: Any) -> tuple[int, int]:
    """Return the size in bytes, and the number of values in JSON that is not a string."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode(errors="surrogatepass")), 0
    if isinstance(value, bytes):
        return len(value) * 4 // 3, 0
    if frames.too_deep(value):
        raise frames.FrameError(f"nested deeper than {frames.MAX_DEPTH} levels")
    encoded = frames.encode("", {"": value})
    return len(encoded), frames.values_in(encoded)


def _checked(metadata: dict[str, Any] | None) -> dict[str, Any]:
    if metadata:
        frames.check_json(metadata)
    return metadata or {}


class FrameDisplayHook(DisplayHook):
    """sys.displayhook: sends the value of a cell's last expression as `execute_result`."""

    exec_result = None  # not a trait, as below in the shell

    def quiet(self) -> bool:
        # Without a semicolon in the cell, it cannot end with one: do not tokenize the cell.
        history = self.shell.history_manager.input_hist_parsed
        return bool(history) and ";" in history[-1] and bool(super().quiet())

    def write_output_prompt(self) -> None:
        """Do nothing: the number is part of the frame."""

    def write_format_data(self, format_dict: dict[str, Any], md_dict: Any = None) -> None:
        self._shown = bounded(format_dict, self.shell.mime_max)
        content = {
            "execution_count": self.prompt_count,
            "data": self._shown,
            "metadata": _checked(md_dict),
            **_cut_note(format_dict, self._shown),
        }
        # After a cell's last expression only its reply follows, so hold this frame for it. (No
        # other code calls this from there, unless it names sys.displayhook: then the frame waits a
        # moment, see `Output`.)
        caller = sys._getframe(1).f_back
        is_last = caller is not None and caller.f_code is self.shell.compile.last_expression
        self.shell.publish("execute_result", content, hold=is_last)

    def log_output(self, format_dict: dict[str, Any]) -> None:
        super().log_output(self._shown)  # without the cut part: history keeps it indefinitely

    def finish_displayhook(self) -> None:
        self._is_active = False


class FrameDisplayPublisher(DisplayPublisher):
    """display(), update_display() and clear_output()."""

    def publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        *_ignored: Any,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **_more: Any,
    ) -> None:
        self._validate_data(data, metadata)
        shown = bounded(data, self.shell.mime_max)
        content = {
            "data": shown,
            "metadata": _checked(metadata),
            "transient": {str(key): str(value) for key, value in (transient or {}).items()},
            **_cut_note(data, shown),
        }
        self.shell.publish("update_display_data" if update else "display_data", content)

    def clear_output(self, wait: bool = False) -> None:
        self.shell.publish("clear_output", {"wait": bool(wait)})


class Payloads(PayloadManager):
    """The requests of a cell to its front end.

    A Jupyter front end gets them with the reply. Any other caller reads them in the output, as in
    IPython without a terminal.
    """

    for_front_end = True

    def write_payload(self, data: dict[str, Any], single: bool = True) -> None:
        if self.for_front_end:
            super().write_payload(data, single)
            return
        match data:
            case {"source": "page", "data": {"text/plain": str(text)}}:
                pass
            case {"source": "set_next_input", "text": str(text)}:
                text = f"# text for the next cell:\n{text}"
            case _:
                text = f"{str(data['source'])[:_SOURCE_MAX]}: only a Jupyter front end does this"
        sys.stdout.write(text if text.endswith("\n") else f"{text}\n")
