# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Refuses other versions of Python before pip looks for packages; all else is in pyproject.toml.

pip up to 23.0, which Python 3.10 has, reads `requires-python` only after it has found all dependencies, and ends with a
dependency that has no build for this version.
"""

import sys

from setuptools import setup

if not (3, 11) <= sys.version_info < (3, 14):
    found = sys.version.split()[0]
    sys.exit(f"marin_rl needs Python 3.11, 3.12 or 3.13, but this is {found}; make the environment with one of them")
setup()
