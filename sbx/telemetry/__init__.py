"""Logs, for now: every module logs by `logging.getLogger(__name__)`, below the logger `sbx`.

A library does not configure logging; `sbx serve` and the command line do. Imports nothing of ours.
"""
