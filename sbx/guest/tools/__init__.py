"""Programs that run inside the walls for the runtime: each is started by its path.

archive       packs and unpacks directories
tmp_files     reads and writes files in /tmp for the tools of an agent
script_files  writes the file of a script
script.cjs    runs a script by Node.js as if it were in the working directory
"""
