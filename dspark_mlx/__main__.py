"""``python -m dspark_mlx`` is the ``dspark`` command."""

import sys

from .commands import main

if __name__ == "__main__":
    sys.exit(main())
