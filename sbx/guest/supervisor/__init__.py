"""PID 1 of a jail: it starts, signals and reaps processes, and obeys the control socket.

pid1            the supervisor
commands        the shell commands that it runs next to a busy cell
children        their OOM scores, their signals, and their exit status
terminal        a pseudo-terminal for an interactive command
proxy_listener  waits for the first connection to the egress proxy, and forks the relay
proxy_relay     copies connections of the loopback to the socket of the egress proxy
"""
