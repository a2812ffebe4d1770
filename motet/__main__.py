"""`python -m motet` is `motet`."""

import sys

from motet.cli.main import main

sys.exit(main())
