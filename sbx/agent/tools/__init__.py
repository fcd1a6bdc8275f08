"""The tools that a model may call.

tool.py         the definition of a tool
registry.py     tools by name: parse a call of the model, return its result
arguments.py    check arguments against a schema, and describe errors
function_tool.py          `@tool`, for functions of the user
schema_formats.py     definitions in the formats of OpenAI, Anthropic and MCP
permissions.py  allow, ask or deny, by the effect of a call and not by the name of its tool
approval_rules.py        rules that the user created: an exact call, a prefix of commands
paths.py        the paths that code in the sandbox uses, and how tools access them
execution.py      run_code, execute_command
following.py    follow a run to its end, or interrupt it
figures.py      images that a run showed
files.py        read_file, write_file, edit_file, list_files
results.py      errors as text, shortened long results, files with the full text
"""
