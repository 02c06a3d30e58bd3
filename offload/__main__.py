"""``python -m offload``: the command line."""

import sys

from offload.command_line.main import main

if __name__ == "__main__":
    sys.exit(main())
