"""How long a test waits before it gives up: one generous setting, as a wait that succeeds is short.

Limits that are promises of the product do not stand here.
"""

import os

PATIENCE_S = 300.0 * float(os.environ.get("MELLD_TEST_PATIENCE", "1"))
TEST_S = 4 * PATIENCE_S
"""A whole test with its fixtures: more than one wait may be long on a busy machine."""
