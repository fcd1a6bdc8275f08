"""sbx: a local-first sandbox runtime for code that AI agents write.

    from sbx import Sandbox
    with Sandbox() as box:
        print(box.run("1 + 1").result)

`Sandbox` is synchronous, `Runtime` and `AsyncSandbox` are the same for asyncio; with
`Sandbox(connect=…)`, or `sbx.client`, they are in a service. Names are loaded when they are used,
so that importing sbx costs next to nothing.
"""

TYPE_CHECKING = False  # what type checkers take for true; importing typing would cost 20 ms
if TYPE_CHECKING:
    from sbx.errors import SbxError
    from sbx.policy import Policy
    from sbx.protocol.runs import Cause, Run, Status
    from sbx.runtime.conversation import Conversation
    from sbx.runtime.runtime import Runtime
    from sbx.runtime.sandbox import AsyncSandbox
    from sbx.runtime.settings import Settings
    from sbx.sync.sandbox import Sandbox, close
    from sbx.version import __version__

__all__ = [
    "AsyncSandbox",
    "Cause",
    "Conversation",
    "Policy",
    "Run",
    "Runtime",
    "Sandbox",
    "SbxError",
    "Settings",
    "Status",
    "__version__",
    "close",
]

_HOMES = {
    "AsyncSandbox": "sbx.runtime.sandbox",
    "Cause": "sbx.protocol.runs",
    "Conversation": "sbx.runtime.conversation",
    "Policy": "sbx.policy",
    "Run": "sbx.protocol.runs",
    "Runtime": "sbx.runtime.runtime",
    "Sandbox": "sbx.sync.sandbox",
    "SbxError": "sbx.errors",
    "Settings": "sbx.runtime.settings",
    "Status": "sbx.protocol.runs",
    "__version__": "sbx.version",
    "close": "sbx.sync.sandbox",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'sbx' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
