"""`python -m slurmbridge`."""

import sys

from slurmbridge.cli import main

sys.exit(main())
