"""`python -m extender`, the same as `slurmbridge-extender`."""

import sys

from extender.cli import main

sys.exit(main())
