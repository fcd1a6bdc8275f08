"""The files of one conversation.

files              list, read, write, search and move
open_files         the open directories of a conversation; the limit for them
streams            reads and writes files in chunks, in worker threads
resumable_uploads  uploads in pieces
archives           directories as archives
watch              changes of files as events
disk_limit, quota  keep a conversation within its bytes and files
usage              how much of each resource a sandbox uses
"""
