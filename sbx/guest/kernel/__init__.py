"""The process that runs the user's cells: one IPython shell, its frames and its output.

setup            turns a sealed process into a kernel: `start`, `serve`
config           the start configuration of a kernel
loop             reads requests, runs cells, writes replies
shell            the IPython shell, its limits and its completions
lean_shell       IPython without the work that most cells do not need
display          the values that cells show, as frames
output           text, and the output of descriptors 1 and 2, as frames, in order
streams          sys.stdout and sys.stderr
comms            Jupyter's comms over frames
system_commands  `!command`
errors           the errors of cells, and the walls that caused them
"""
