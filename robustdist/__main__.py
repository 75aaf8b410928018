"""``python -m robustdist``: the same as the ``robustdist`` command."""

import sys

from robustdist.cli import main

if __name__ == "__main__":
    sys.exit(main())
