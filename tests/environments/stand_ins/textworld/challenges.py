# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

from typing import Any

CHALLENGES: dict[str, Any] = {}
