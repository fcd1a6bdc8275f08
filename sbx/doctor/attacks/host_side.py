"""host: files that code plants in its workspace against the runtime outside.

The code plants a file. Then the runtime does an action that a caller may request at any time. The
attack escaped if the reply contains the secret of the decoy, if the decoy was changed, or if the
runtime does not reply.
"""

import asyncio
import io
import zipfile
from contextlib import aclosing
from pathlib import Path
from typing import Any

from sbx import errors
from sbx.doctor.attacks.attack import Attack, Class
from sbx.doctor.attacks.decoys import Decoys
from sbx.runtime.sandbox import AsyncSandbox

_ACT_S = 5.0
_AT_MOST = 1 << 20
_LINK = "os.symlink(HOST['file'], f'{WORK}/%s')"
_DIRECTORY_LINK = "os.symlink(os.path.dirname(HOST['file']), f'{WORK}/%s')"
_FIFO = "os.mkfifo(f'{WORK}/%s')"

_PLANTED: dict[str, tuple[str, tuple[str, ...]]] = {
    "read by a link": (_LINK, ("read",)),
    "read by a link to a directory": (_DIRECTORY_LINK, ("read", "bait")),
    "read by a link that climbs": (
        "os.symlink('../' * 40 + HOST['file'].lstrip('/'), f'{WORK}/%s')",
        ("read",),
    ),
    "read by a magic link": (
        "os.symlink('/proc/self/root' + HOST['file'], f'{WORK}/%s')",
        ("read",),
    ),
    "read of a pipe without a writer": (_FIFO, ("read",)),
    "download by a link": (_LINK, ("download",)),
    "download of a pipe without a writer": (_FIFO, ("download",)),
    "write by a link": (_LINK, ("write",)),
    "write by a link to a directory": (_DIRECTORY_LINK, ("write", "bait")),
    "write to a pipe without a reader": (_FIFO, ("write",)),
    "list by a link to a directory": (_DIRECTORY_LINK, ("list",)),
    "list of a tree with a link out of it": (
        f"os.mkdir(f'{{WORK}}/%s'); {_DIRECTORY_LINK.replace('%s', '%s/out')}",
        ("list",),
    ),
    "search of names by a link": (_DIRECTORY_LINK, ("find",)),
    "search in files by a link": (_DIRECTORY_LINK, ("grep",)),
    "search in a pipe without a writer": (
        f"os.mkdir(f'{{WORK}}/%s'); {_FIFO.replace('%s', '%s/pipe')}",
        ("grep",),
    ),
    "copy by a link": (_LINK, ("copy",)),
    "copy of a tree with a link out of it": (
        f"os.mkdir(f'{{WORK}}/%s'); {_LINK.replace('%s', '%s/out')}",
        ("copy", "out"),
    ),
    "copy onto a link": (_LINK, ("copy onto",)),
    "move into a link to a directory": (_DIRECTORY_LINK, ("move into",)),
    "change of permissions by a link": (_LINK, ("chmod",)),
    "replacement of text by a link": (_LINK, ("replace",)),
    "removal by a link to a directory": (_DIRECTORY_LINK, ("delete", "bait")),
    "removal of a tree with links out of it": (
        f"os.mkdir(f'{{WORK}}/%s'); {_DIRECTORY_LINK.replace('%s', '%s/out')}",
        ("delete",),
    ),
    "a directory made by a link to a directory": (_DIRECTORY_LINK, ("make", "made")),
    "an archive of a tree with a link out of it": (
        f"os.mkdir(f'{{WORK}}/%s'); {_LINK.replace('%s', '%s/out')}",
        ("archive",),
    ),
}


def _attacks() -> tuple[Attack, ...]:
    attacks = []
    for number, (name, (code, act)) in enumerate(_PLANTED.items()):
        place = f"attack-host-{number}"
        verb, *rest = act
        path = "/".join((place, *rest))
        attacks.append(
            Attack(name, Class.HOST, "runtime", code.replace("%s", place), act=(verb, path))
        )
    return tuple(attacks)


HOST_SIDE = _attacks()
VERBS = tuple(dict.fromkeys(attack.act[0] for attack in HOST_SIDE))
_REPLYING = frozenset(("read", "download", "list", "find", "grep", "copy", "archive"))
_ON_FILES = frozenset(("read", "download", "write", "copy", "copy onto", "chmod", "replace"))
_OWN_TEXT = "a secret of the control"


async def act_on(box: AsyncSandbox, attack: Attack, baits: Decoys) -> str:
    """Do the action of the host on the planted file. Return the outcome, as in attack.py."""
    before = _look(baits.file)
    try:
        async with asyncio.timeout(_ACT_S):
            reply = await _act(box, *attack.act)
    except errors.Broken as error:
        return error.code  # a bug, and not a refusal
    except errors.SbxError:
        reply = ""  # refused
    except TimeoutError:
        return "timeout"
    if before == _look(baits.file):
        return "ok" if baits.token in reply else "held"
    baits.lay_again()
    return "ok"


async def act_on_own(box: AsyncSandbox, verb: str) -> str:
    """Do the same action on ordinary files, as the control. Return its outcome."""
    top = f"attack-control-{verb.replace(' ', '-')}"
    try:
        await box.files.write(f"{top}/file", _OWN_TEXT)
        path = f"{top}/file" if verb in _ON_FILES else top
        reply = await _act(box, verb, f"{top}/new" if verb == "make" else path)
    except errors.SbxError as error:
        return error.code
    shows = _OWN_TEXT if verb in ("read", "download", "copy", "archive") else "file"
    return "ok" if verb not in _REPLYING or shows in reply else "held"


def _look(bait: Path) -> Any:
    """Return the state of the decoy and of its directory on the host."""
    if not bait.exists():
        return None
    names = sorted(path.name for path in bait.parent.iterdir())
    return names, bait.read_bytes(), bait.stat().st_mode


async def _act(box: AsyncSandbox, verb: str, path: str) -> str:
    """Do the action. Return the reply to the caller as text."""
    files = box.files
    match verb:
        case "read":
            return (await files.read_bytes(path))[:_AT_MOST].decode(errors="replace")
        case "download":
            stream = await files.open_stream(path)
            try:
                return str(await anext(aiter(stream.chunks()), b""))
            finally:
                await stream.aclose()
        case "write":
            await files.write(path, "changed by the host side")
        case "list":
            return str(await files.list(path, max_depth=4))
        case "find":
            return str(await files.find("*", path))
        case "grep":
            return str(await files.grep("a", path))
        case "copy":
            await files.copy(path.partition("/")[0], f"{path.partition('/')[0]}-copy")
            copied = f"{path.partition('/')[0]}-copy/{path.partition('/')[2]}".rstrip("/")
            return (await files.read_bytes(copied)).decode(errors="replace")
        case "copy onto":
            await files.write("attack-source", "changed by the host side")
            await files.copy("attack-source", path, overwrite=True)
        case "move into":
            await files.write("attack-source", "changed by the host side")
            await files.move("attack-source", f"{path}/moved")
        case "chmod":
            await files.chmod(path, 0o600)
        case "replace":
            await files.replace(path, "secret", "changed")
        case "delete":
            await files.delete(path)
        case "make":
            await files.make_directory(path)
        case "archive":
            pieces = b""
            async with aclosing(files.archive(path, format="zip")) as archive:
                async for piece in archive:
                    pieces += piece
            with zipfile.ZipFile(io.BytesIO(pieces)) as packed:
                return str([packed.open(name).read(_AT_MOST) for name in packed.namelist()])
        case _:
            raise AssertionError(verb)
    return ""
