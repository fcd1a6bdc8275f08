"""Tools outside of sbx that an operator registers: MCP servers, HTTP endpoints, Python functions.

    source.py      a file that describes a source of tools
    registry.py    the sources of a directory: who may use them, and their limits
    mcp_server.py  an MCP server, which is started again after it has ended
    http.py        one endpoint, or the operations of an OpenAPI document
    functions.py   functions of Python modules on the host

The results of these tools are text of strangers. They are limited, and the values of secrets are
removed before a model, an event or a log has them.
"""
