"""A code executor for the CodeAgent of smolagents.

    with Sandbox(policy="data-science") as box:
        agent = CodeAgent(tools=[], model=model, executor=SbxExecutor(box))
        agent.run("How many rows has data.csv?")

It is a remote executor of smolagents. Tools, variables and final answers work as in the others.
"""

from typing import Any

from sbx.agent.tools.execution import describe_run
from sbx.errors import BadRequest, needs_extra
from sbx.protocol.runs import Run, quarantine_notice, strip_escapes
from sbx.sync.blocking import BlockingConversation

with needs_extra("sbx.adapters.smolagents", "smolagents"):
    from smolagents.local_python_executor import CodeOutput
    from smolagents.monitoring import AgentLogger, LogLevel
    from smolagents.remote_executors import RemotePythonExecutor
    from smolagents.tools import Tool
    from smolagents.utils import AgentError

# Run after the cell that raised it: error messages have a lower size limit than output.
_READ_ANSWER = "import sys; _ = sys.stdout.write(sys.last_value.value)"


class SbxExecutor(RemotePythonExecutor):  # type: ignore[misc]  # smolagents ships no types
    """Runs each step in the kernel of this sandbox or conversation, so variables are kept. The
    caller closes the sandbox. Tools are sent in as source code and run inside, with the permissions
    of the policy. No packages are installed for them. Answers and variables cross the boundary as
    JSON, never pickled. Pillow opens an image in an answer outside the sandbox."""

    def __init__(
        self,
        sandbox: BlockingConversation,
        *,
        timeout: float | None = None,
        logger: AgentLogger | None = None,
    ) -> None:
        """`timeout` is in seconds, for each step."""
        super().__init__([], logger or AgentLogger(level=LogLevel.OFF), allow_pickle=False)
        self._sandbox = sandbox
        self._timeout = timeout
        self._set_up: list[str] = []  # the cells of send_variables and send_tools
        self._is_set_up = True
        self.state: dict[str, Any] = {}  # an agent reads the output before an error here

    def __call__(self, code_action: str) -> CodeOutput:
        if not self._is_set_up:  # the kernel ended; an agent needs final_answer to finish
            for code in self._set_up:
                self._run_cell(code)
            self._is_set_up = True
        return self._output(self._run_cell(code_action))

    def send_variables(self, variables: dict[str, Any]) -> None:
        """Send variables. An agent does this first in each of its runs; `send_tools` follows."""
        self._set_up.clear()
        super().send_variables(variables)

    def send_tools(self, tools: dict[str, Any]) -> None:
        """Send tools. Raise BadRequest `not_a_tool` for a managed agent, which runs outside the
        sandbox."""
        for name, tool in tools.items():
            if not isinstance(tool, Tool):
                raise BadRequest(
                    f"{name} is not a tool with source code that can be sent into a sandbox",
                    code="not_a_tool",
                )
        super().send_tools(tools)

    def install_packages(self, additional_imports: list[str]) -> list[str]:
        """Install nothing: the policy determines the packages. Code that imports a missing one gets
        an ImportError."""
        return additional_imports

    def run_code_raise_errors(self, code: str) -> CodeOutput:
        """Run code. The base class sends variables and tools with this method."""
        self._set_up.append(code)
        return self._output(self._run_cell(code))

    def _patch_final_answer_with_exception(self, final_answer_tool: Any) -> None:
        """Patch the tool only once. A second patch, in a second run of an agent, would make the
        tool call itself in an infinite recursion."""
        if not hasattr(final_answer_tool, "_forward"):
            super()._patch_final_answer_with_exception(final_answer_tool)

    def _run_cell(self, code: str) -> Run:
        run = self._sandbox.run(code, timeout=self._timeout)
        if run.state_lost:
            self._is_set_up = False
        return run

    def _output(self, run: Run) -> CodeOutput:
        logs = strip_escapes(run.stdout + run.stderr)
        if run.truncated:
            logs += "\n[there was more output than the limit]"
        if notice := quarantine_notice(run.quarantined):
            logs += f"\n{notice}"
        if run.ok and run.error is not None:
            logs += f"\n{run.error.traceback}"
        self.state["_print_outputs"] = logs
        if run.error is not None and run.error.name == self.FINAL_ANSWER_EXCEPTION:
            return CodeOutput(output=self._final_answer(), logs=logs, is_final_answer=True)
        if not run.ok:
            raise AgentError(_failure(run), self.logger)
        return CodeOutput(output=run.result, logs=logs, is_final_answer=False)

    def _final_answer(self) -> Any:
        run = self._run_cell(_READ_ANSWER)
        try:
            return self._deserialize_final_answer(run.stdout)
        except Exception:  # noqa: BLE001  # it comes from inside and may be hostile
            why = "it is too long" if run.truncated else "its format is not that of final_answer"
            raise AgentError(f"The final answer cannot be read: {why}", self.logger) from None


def _failure(run: Run) -> str:
    """Return the error text for the model. The output is passed separately."""
    return describe_run(
        Run(run.run_id, run.status, run.cause, error=run.error, state_lost=run.state_lost)
    )
