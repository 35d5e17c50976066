"""``python -m thinwire``, so that launchers such as torchrun can start the command."""

import sys

from thinwire.cli import main

if __name__ == "__main__":
    sys.exit(main())
