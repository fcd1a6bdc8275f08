"""What a model may call.

tool.py         what a tool is
registry.py     tools by name: a call comes in as a model wrote it, a result goes out
arguments.py    arguments checked against a schema, and what is wrong said in words
own.py          `@tool`, for a user's own functions
dialects.py     definitions as OpenAI, Anthropic and MCP write them
permissions.py  allow, ask or deny: by what a call would do, not by its tool's name
rules.py        what a person allowed always: an exact call, a prefix of commands
paths.py        the paths that code sees, and who reaches them
running.py      run_code, execute_command
following.py    a run, to its end or given up
figures.py      pictures that a run showed
files.py        read_file, write_file, edit_file, list_files
results.py      errors in words, long results cut, and the whole kept in a file
"""
