"""What a model may call.

tool.py         what a tool is
registry.py     tools by name, `@tool`, arguments checked, results cut to size
dialects.py     definitions as OpenAI, Anthropic and MCP write them
permissions.py  allow, ask or deny: by what a call would do, not by its tool's name
paths.py        the paths that code sees, and who reaches them
running.py      run_code, execute_command
files.py        read_file, write_file, edit_file, list_files
"""
