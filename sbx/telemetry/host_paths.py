"""Errors as tenants may read them: without the paths of the host.

Errors contain paths of the host, which is right for the user of a terminal and for the log. The
caller of a service and a model must not see them. Refusals of a request keep the paths that the
request itself named. Errors about the host and its policies lose all paths, except those that code
inside a sandbox sees. Paths below the directories of the service are always removed.
"""

import logging
import re
from pathlib import Path
from typing import Any

from sbx.errors import Broken, PolicyError, SbxError, Unavailable

_HIDDEN = "<host path>"
_ABOUT_THE_HOST = (Unavailable, Broken, PolicyError)
_CODES = {"data_directory_not_private", "environment_not_private", "policy_not_found"}
# At least two parts, so that a lone "/" and the name of a route stay. Spaces only within quotes.
_INSIDE = r"(?!(?:workspace|mnt|uploads|v1|api)\b)"
_NAME = r"[^\s/'\"`,;:()\[\]{}<>]+"
_PATH = re.compile(
    rf"(?<=')/{_INSIDE}[^'/\n]+/[^'\n]*(?=')|(?<![\w/.<-])/{_INSIDE}{_NAME}(?:/{_NAME})+"
)
_own: dict[str, re.Pattern[str]] = {}
_log = logging.getLogger(__name__)


def hide_below(directory: Path) -> None:
    """Hide paths below this directory of the service, wherever it is, also below /mnt."""
    _own[str(directory)] = re.compile(rf"{re.escape(str(directory))}(?:/{_NAME})*(?![\w-])")


def without_host_paths(error: SbxError) -> dict[str, Any]:
    """Return `error.to_dict()` without paths of the host. If they differ, log the whole error."""
    if not isinstance(error, _ABOUT_THE_HOST) and error.code not in _CODES:
        return error.to_dict()
    return _hidden(error)


def hide_in(error: SbxError) -> None:
    """Remove all paths of the host from an error that contains no path of a request; log it
    whole."""
    shown = _hidden(error)
    error.args = (shown["message"],)
    error.message, error.hint = shown["message"], shown.get("hint")
    error.details = shown.get("details", error.details)


def _hidden(error: SbxError) -> dict[str, Any]:
    original = error.to_dict()
    shown = {name: _without(value) for name, value in original.items()}
    if shown != original:
        _log.warning("%s: %s (%s)", error.code, error.message, error.hint or "no hint")
    return shown


def _without(value: Any) -> Any:
    match value:
        case str():
            for path in _own.values():
                value = path.sub(_HIDDEN, value)
            return _PATH.sub(_HIDDEN, value)
        case dict():
            return {name: _without(item) for name, item in value.items()}
        case list() | tuple():
            return [_without(item) for item in value]
    return value
