# SPDX-License-Identifier: Apache-2.0
"""Operations of other packages."""
