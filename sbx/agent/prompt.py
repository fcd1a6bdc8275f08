"""The system prompt of an agent. It names only the paths and the abilities that exist."""

from collections.abc import Sequence

from sbx.agent.sandbox import ToolSandbox
from sbx.errors import SbxError
from sbx.protocol.surroundings import Surroundings

_KERNEL = "a Python kernel that keeps its variables between calls"


async def surroundings_of(sandbox: ToolSandbox) -> Surroundings:
    """Return the surroundings of a sandbox. If it does not report them, assume a whole one."""
    read = getattr(sandbox, "surroundings", None)
    try:
        return Surroundings() if read is None else await read()
    except SbxError:  # the first call of a tool then reports it
        return Surroundings()


def system_prompt(around: Surroundings, instructions: str = "") -> str:
    """Return the prompt for these surroundings, followed by the instructions of a profile."""
    runs_code = bool(around.run_languages)
    sentences = [
        *_place(around),
        "Do the task with the tools.",
        "Look at data before you rely on what it holds.",
        *(["When code fails, read the traceback, mend the cause and run it again."] * runs_code),
        "When you are done, answer in a few plain words, with the figures that were asked for and"
        " the paths of the files that you made.",
    ]
    text = " ".join(sentences)
    return f"{text}\n\n{instructions}" if instructions else text


def _place(around: Surroundings) -> list[str]:
    has_python, has_shell = (name in around.capabilities for name in ("python", "shell"))
    abilities = [*([_KERNEL] * has_python), *(["a shell"] * has_shell)]
    if around.place == "host":
        return [
            f"You work on the computer of the user, without a sandbox: {_and(abilities)}.",
            f"The working directory is {around.shown_directory}.",
            "Your tools reach every file that the user can access: change nothing that the task"
            " does not need.",
        ]
    if around.place == "directory":
        place = "You work in a sandbox over a directory of the user, which is /workspace there"
        first = f"{place}: {_and(abilities)}." if abilities else f"{place}."
    else:
        first = f"You work in a sandbox: {_and(['your own /workspace', *abilities])}."
    if has_shell:
        return [first]
    return [first, "It starts no other programs." if has_python else "It runs no code."]


def _and(parts: Sequence[str]) -> str:
    *most, last = parts
    comma = "," if len(most) > 1 else ""
    return f"{', '.join(most)}{comma} and {last}" if most else last
