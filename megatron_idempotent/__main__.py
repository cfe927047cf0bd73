"""`python -m megatron_idempotent` is the command `megatron-idempotent`."""

import sys

from .cli.main import main

sys.exit(main())
