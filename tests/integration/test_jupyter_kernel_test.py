"""Jupyter's own tests for kernels, the package jupyter_kernel_test, every class of it.

It waits a tenth of a second, at each step, for messages that a busy machine may bring later, and
for none to come. Here it waits for those that must come.
"""

import time
from functools import partial
from typing import Any
from unittest import mock

import jupyter_kernel_test as kernel_test
from jupyter_specs import DEFAULT, STANDALONE, STOCK, jupyter_kernels  # noqa: F401

PATIENCE_S = 60.0


class Said:
    """What the tests are to say to a Python kernel; each test for which there is nothing to say is
    skipped, so none may be missing."""

    language_name = "python"
    file_extension = ".py"
    code_hello_world = "print('hello, world')"
    code_stderr = "import sys; print('of no use', file=sys.stderr)"
    code_page_something = "zip?"
    code_generate_error = "raise ValueError('as asked')"
    code_clear_output = "from IPython.display import clear_output; clear_output()"
    code_inspect_sample = "zip"
    code_history_pattern = "6?7"
    # IPython says of a range of the current session that it is number 0
    supported_history_operations = ("tail", "search") if STOCK else ("tail", "range", "search")
    complete_code_samples = ("1", "print('x')", "def f():\n  pass\n\n", "%env")
    incomplete_code_samples = ("print('''x", "def f():\n  x", "for i in range(3):", "a = [1,")
    invalid_code_samples = ("import = 7q", "x = 1 +* 2")
    completion_samples = (
        {"text": "zi", "matches": {"zip"}},
        {"text": "import itertoo", "matches": {"itertools"}},
        {"text": "%%wri", "matches": {"%%writefile"}},
    )
    code_execute_result = (
        {"code": "6*7", "result": "42"},
        {"code": "6+7*2", "result": "20"},
        {"code": "6-7*2", "result": "-8"},
        {"code": "from IPython.display import HTML; HTML('<b>x</b>')", "mime": "text/html"},
    )
    code_display_data = (
        {
            "code": "from IPython.display import HTML, display; display(HTML('x'))",
            "mime": "text/html",
        },
        {
            "code": "from IPython.display import Math, display; display(Math('x'))",
            "mime": "text/latex",
        },
    )


def _checked(message: dict[str, Any]) -> tuple[str | None, str | None]:
    """What it belongs to, and the state that it tells."""
    kernel_test.validate_message(message)
    return message["parent_header"].get("msg_id"), message["content"].get("execution_state")


class Patient(Said):
    kc: Any

    def flush_channels(self) -> None:
        """Until the kernel is idle behind all that was asked so far."""
        asked = self.kc.kernel_info()
        while _checked(self.kc.get_shell_msg(timeout=PATIENCE_S)) != (asked, None):
            pass
        while _checked(self.kc.get_iopub_msg(timeout=PATIENCE_S)) != (asked, "idle"):
            pass

    def execute_helper(self, *words: Any, **options: Any) -> Any:
        channel = self.kc.iopub_channel
        read = partial(channel.get_msg, PATIENCE_S)
        with mock.patch.object(channel, "get_msg", lambda timeout: read()):  # noqa: PT008
            return super().execute_helper(*words, **options)  # type: ignore[misc]


class TestKernel(Patient, kernel_test.KernelTests):  # type: ignore[misc]  # untyped
    kernel_name = DEFAULT


class TestKernelOfItsOwnProcess(Patient, kernel_test.KernelTests):  # type: ignore[misc]  # untyped
    kernel_name = STANDALONE


class Welcome(kernel_test.IopubWelcomeTests):  # type: ignore[misc]  # untyped
    support_iopub_welcome = True

    def tearDown(self) -> None:
        """The welcome is there before the client's heart beats, and a client that is closed just
        then opens a socket in a context that has ended: EMFILE, in a thread."""
        heart, until = self.kc.hb_channel, time.monotonic() + PATIENCE_S
        while not heart._running:
            assert time.monotonic() < until
            time.sleep(0.01)


class TestWelcome(Welcome):
    kernel_name = DEFAULT


class TestWelcomeOfItsOwnProcess(Welcome):
    kernel_name = STANDALONE


del Welcome  # which is none of the tests
