# SPDX-License-Identifier: Apache-2.0
"""`python -m jaxbridge`: what is installed here, and whether a call works."""

import faulthandler
import sys

from ._diagnostics import main

# Should native code crash in a probe, this shows where; the sections before it are printed already.
faulthandler.enable()
sys.exit(main())
