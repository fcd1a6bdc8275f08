"""`python -m sbx` is the command `sbx`."""

import sys

from sbx.cli import main

sys.exit(main())
