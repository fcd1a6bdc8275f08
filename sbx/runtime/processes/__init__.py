"""Processes of a sandbox besides its cells.

commands, command_log       shell commands in the background, and their output on disk
terminals, terminal_screen  interactive terminals; emulator keeps the screen of one
languages, scripts          scripts in other languages, and their interpreters
"""
