"""A traceback is cut before it is formatted: the kernel and its variables survive a deep recursion.

IPython takes 3 ms for each frame. So each of these was killed at its time-out.
"""

import pytest

from sbx.runtime.sandbox import AsyncSandbox

DEEP = "import sys\nsys.setrecursionlimit(20_000)\ndef f(n): return f(n + 1)\n"
ERRORS = {
    "one function": (DEEP + "f(0)", "RecursionError", "more frames"),
    "functions in turn": (
        DEEP + "def a(): b()\ndef b(): c()\ndef c(): a()\na()",
        "RecursionError",
        "more frames",
    ),
    "a cause": (
        DEEP + "try: f(0)\nexcept RecursionError as e: raise ValueError('x') from e",
        "ValueError",
        "more frames",
    ),
    "many causes": (
        "e = None\nfor i in range(5000):\n"
        "    try:\n        raise ValueError(i) from e\n"
        "    except ValueError as error: e = error\n"
        "raise e",
        "ValueError",
        "earlier errors of the chain",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
async def test_a_long_traceback_is_cut_before_it_is_formatted(box: AsyncSandbox, name: str) -> None:
    code, kind, note = ERRORS[name]
    await box.run("keep = 1")
    run = await box.run(code, timeout=20)
    assert run.error is not None
    assert (run.status, run.error.name) == ("error", kind)
    assert note in run.error.traceback
    assert "Cell In[2]" in run.error.traceback
    again = await box.run("%tb", timeout=20)
    assert again.ok
    assert again.error is not None
    assert note in again.error.traceback
    assert (await box.run("keep")).result == "1"


async def test_an_interrupt_while_an_error_is_formatted_leaves_a_plain_one(
    box: AsyncSandbox,
) -> None:
    await box.run("%xmode Verbose\nclass Slow:\n    def __repr__(self):\n        while True: pass")
    run = await box.run("def g(slow): 1 / 0\ng(Slow())", timeout=2)
    assert run.status == "timeout"
    assert run.error is not None
    assert run.error.traceback.endswith("ZeroDivisionError: division by zero")
    assert (await box.run("Slow.__name__")).result == "'Slow'"


async def test_an_error_after_thousands_of_others_is_itself(box: AsyncSandbox) -> None:
    """IPython looks through them by recursion, and the run reported a RecursionError."""
    run = await box.run(
        "error = None\nfor i in range(5000):\n"
        "    try:\n"
        "        try: raise error or ValueError()\n"
        "        except ValueError: raise ValueError(i)\n"
        "    except ValueError as e: error = e\n"
        "raise error",
        timeout=60,
    )
    assert run.error is not None
    assert (run.error.name, run.error.value) == ("ValueError", "4999")
    assert run.error.traceback.endswith("ValueError: 4999")
