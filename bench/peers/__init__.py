"""The alternatives to sbx, installed from the registries and measured in turn with it.

command   ./scripts/bench peers
install   a virtual environment, npm packages and Debian packages for the alternatives
subjects  each alternative, and how it runs code
worker    runs in the virtual environment of the alternatives that are Python libraries
"""
