"""The agent: a loop over a model and its tools, handed a sandbox, with approvals and memory.

    agent.py         the loop; reads like the contract
    messages.py      what a conversation consists of
    models/          one small contract, three ways to get an answer
    tools/           what a model may call, and what each call would do
    approvals.py     a person's yes or no, waited for
    history.py       where messages are kept
    chats.py         the agents of a service: one run a conversation, followed from afar

It imports rows below, and never the runtime: a sandbox in this process, one in a service and a fake
look the same from here (sandbox.py).
"""
