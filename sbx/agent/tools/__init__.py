"""The tools that a model may call.

tool.py            the definition of a tool
registry.py        tools by name: parse a call of the model, return its result
arguments.py       check arguments against a schema, and describe errors
function_tool.py   `@tool`, for functions of the user
schema_formats.py  definitions in the formats of OpenAI, Anthropic and MCP
approval_rules.py  allow, ask or deny; the rules that the user created
paths.py           the paths that code in the sandbox uses, and how tools access them
execution.py       run_code, execute_command; follow a run to its end
figures.py         images that a run showed
access.py          ask a person for access that the policy refuses
files.py           read_file, write_file, edit_file, list_files
results.py         errors as text, shortened long results, files with the full text
"""
