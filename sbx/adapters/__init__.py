"""Use a sandbox in the agents of other frameworks.

    calling.py        the tools of sbx.agent over one sandbox, for callers with and without asyncio
    smolagents.py     the code executor of a CodeAgent
    langchain.py      LangChain tools
    openai_agents.py  function tools of the OpenAI Agents SDK

Each module needs the package of its framework: pip install 'sbx-runtime[smolagents]', with the
extra `langchain` or `openai-agents`. The caller that created the sandbox still owns and closes it.
"""
