"""``python -m offload``: questions about this machine and about a model, answered without training one."""

import sys

from offload.command_line.main import main

if __name__ == "__main__":
    sys.exit(main())
