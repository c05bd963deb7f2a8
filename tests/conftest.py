# SPDX-License-Identifier: Apache-2.0
"""What all Python tests share: eight virtual CPU devices, and how a test says what it needs."""

import os

# Before JAX is imported anywhere. A GPU run sets the platforms itself.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
