"""`python -m melld` is `melld`."""

import sys

from melld.cli import main

sys.exit(main())
