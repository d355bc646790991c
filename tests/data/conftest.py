# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

from tests.tokenization.conftest import any_chat, byte_chat, chatml, instruct, phi, thinking  # noqa: F401
