# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import importlib.util

import pytest

NEEDS_IRIS = pytest.mark.skipif(importlib.util.find_spec("iris") is None, reason="needs Iris, which needs Python 3.12")
"""Mark of tests with Iris."""
