"""PID 1 of a jail: it starts, signals and reaps processes, and obeys the control socket.

pid1         the supervisor
terminal     a pseudo-terminal for an interactive command
proxy_relay  copies connections of the loopback to the socket of the egress proxy
"""
