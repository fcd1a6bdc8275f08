"""Where a CodeAgent of smolagents runs its code.

    with Sandbox(policy="data-science") as box:
        agent = CodeAgent(tools=[], model=model, executor=SbxExecutor(box))
        agent.run("How many rows has data.csv?")

It is a remote executor of theirs, so tools, variables and final answers work as in their own ones.
"""

from typing import Any

from sbx.adapters import extra_missing
from sbx.agent.tools.running import plain, told
from sbx.blocking import BlockingConversation
from sbx.errors import BadRequest
from sbx.protocol.runs import Run, quarantine_notice

try:
    from smolagents.local_python_executor import CodeOutput
    from smolagents.monitoring import AgentLogger, LogLevel
    from smolagents.remote_executors import RemotePythonExecutor
    from smolagents.tools import Tool
    from smolagents.utils import AgentError
except ImportError:
    raise extra_missing("smolagents") from None

# The cell after the one that raised it: the message of an error is cut where output is not yet.
_READ_ANSWER = "import sys; _ = sys.stdout.write(sys.last_value.value)"


class SbxExecutor(RemotePythonExecutor):  # type: ignore[misc]  # smolagents ships no types
    """State stays from step to step, in the kernel of this sandbox or conversation, which its maker
    closes. Tools are sent in as source code and run inside, with what the policy lets them reach;
    nothing is installed for them. Answers and variables cross the wall as JSON, never pickled; a
    picture in an answer is opened by Pillow here.
    """

    def __init__(
        self,
        sandbox: BlockingConversation,
        *,
        timeout: float | None = None,
        logger: AgentLogger | None = None,
    ) -> None:
        """`timeout` in seconds, for each step."""
        super().__init__([], logger or AgentLogger(level=LogLevel.OFF), allow_pickle=False)
        self._sandbox = sandbox
        self._timeout = timeout
        self._set_up: list[str] = []  # the cells of send_variables and send_tools
        self._is_set_up = True
        self.state: dict[str, Any] = {}  # where an agent looks for what was printed before an error

    def __call__(self, code_action: str) -> CodeOutput:
        if not self._is_set_up:  # the kernel ended; without final_answer an agent could not
            for code in self._set_up:
                self._ran(code)
            self._is_set_up = True
        return self._output(self._ran(code_action))

    def send_variables(self, variables: dict[str, Any]) -> None:
        """The first thing that an agent sends in each of its runs; `send_tools` is the next."""
        self._set_up.clear()
        super().send_variables(variables)

    def send_tools(self, tools: dict[str, Any]) -> None:
        """Raises BadRequest `not_a_tool` for a managed agent, which lives outside."""
        for name, tool in tools.items():
            if not isinstance(tool, Tool):
                raise BadRequest(
                    f"{name} is no tool whose source code can be sent into a sandbox",
                    code="not_a_tool",
                )
        super().send_tools(tools)

    def install_packages(self, additional_imports: list[str]) -> list[str]:
        """There is what the policy has; what is missing is an ImportError of the code."""
        return additional_imports

    def run_code_raise_errors(self, code: str) -> CodeOutput:
        """What the base class sends variables and tools with."""
        self._set_up.append(code)
        return self._output(self._ran(code))

    def _patch_final_answer_with_exception(self, final_answer_tool: Any) -> None:
        """Once: patched again, as for a second run of an agent, it would call itself for ever."""
        if not hasattr(final_answer_tool, "_forward"):
            super()._patch_final_answer_with_exception(final_answer_tool)

    def _ran(self, code: str) -> Run:
        run = self._sandbox.run(code, timeout=self._timeout)
        if run.state_lost:
            self._is_set_up = False
        return run

    def _output(self, run: Run) -> CodeOutput:
        logs = plain(run.stdout + run.stderr)
        if run.truncated:
            logs += "\n[there was more output than may be kept]"
        if notice := quarantine_notice(run.quarantined):
            logs += f"\n{notice}"
        self.state["_print_outputs"] = logs
        if run.error is not None and run.error.name == self.FINAL_ANSWER_EXCEPTION:
            return CodeOutput(output=self._final_answer(), logs=logs, is_final_answer=True)
        if not run.ok:
            raise AgentError(_failure(run), self.logger)
        return CodeOutput(output=run.result, logs=logs, is_final_answer=False)

    def _final_answer(self) -> Any:
        run = self._ran(_READ_ANSWER)
        try:
            return self._deserialize_final_answer(run.stdout)
        except Exception:  # noqa: BLE001  # it comes from inside, and may be anything
            why = "it is too long" if run.truncated else "it is not what final_answer writes"
            raise AgentError(f"The final answer cannot be read: {why}", self.logger) from None


def _failure(run: Run) -> str:
    """What the model is told; what was printed it is told beside."""
    return told(Run(run.run_id, run.status, run.cause, error=run.error, state_lost=run.state_lost))
