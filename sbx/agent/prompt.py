"""The system prompt."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from sbx.agent.sandbox import InProject, ToolSandbox
from sbx.protocol.files import Upload
from sbx.workspace.uploads import uploads_told

SYSTEM = """\
You work in a sandbox: your own /workspace, a Python kernel that keeps its variables between calls,
and a shell. Do the task with the tools. Look at data before you rely on what it holds. When code
fails, read the traceback, mend the cause and run it again. When you are done, answer in a few plain
words, with the figures that were asked for and the paths of the files that you made."""

DescribeFiles = Callable[[Sequence[Upload]], str]
SystemPrompt = Callable[[], Awaitable[str]]


def made_fresh(base: str, sandbox: ToolSandbox, describe: DescribeFiles | None) -> SystemPrompt:
    """Return a function that builds the prompt. It is called before each request to the model,
    because files come and go while an agent works."""
    describe_files = describe or partial(uploads_told, apart=isinstance(sandbox, InProject))

    async def prompt() -> str:
        files = describe_files(await sandbox.uploads.list())
        return f"{base}\n\n{files}" if base else files

    return prompt
