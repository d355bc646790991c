# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Refuses other versions of Python, and makes the links of the README absolute; all else is in pyproject.toml.

pip up to 23.0, which Python 3.10 has, reads `requires-python` only after it has found all dependencies, and ends with a
dependency that has no build for this version.
"""

import re
import sys
from pathlib import Path

from setuptools import setup

REPOSITORY = "https://github.com/marin-community/marin_rl"
LINK = re.compile(r"(!?)(\[(?:[^\[\]]|\[[^\]]*\])*\])\((?![a-z]+:|#)([^)\s]+)\)")
"""An image or a link to a file of the repository."""


def with_absolute_links(readme):
    """Return the README for pages of the package elsewhere."""
    return LINK.sub(
        lambda link: f"{link[1]}{link[2]}({REPOSITORY}/{'raw' if link[1] else 'blob'}/main/{link[3]})", readme
    )


if not (3, 11) <= sys.version_info < (3, 14):
    found = sys.version.split()[0]
    sys.exit(f"marin_rl needs Python 3.11, 3.12 or 3.13, but this is {found}; make the environment with one of them")
readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
setup(long_description=with_absolute_links(readme), long_description_content_type="text/markdown")
