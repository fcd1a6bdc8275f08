"""A sandbox for agents that others built.

calling.py         the tools of sbx.agent over one sandbox, for callers with and without asyncio
smolagents.py      where a CodeAgent runs its code
langchain.py       LangChain tools
openai_agents.py   function tools of the OpenAI Agents SDK

Each needs the package that it plugs into: pip install 'sbx[smolagents]', 'sbx[langchain]',
'sbx[openai-agents]'. The sandbox stays its maker's, who closes it.
"""

from sbx.errors import Unavailable


def extra_missing(extra: str) -> Unavailable:
    return Unavailable(
        f"the packages that sbx plugs into {extra} with are not installed",
        code="extra_missing",
        hint=f"pip install 'sbx[{extra}]'",
    )
