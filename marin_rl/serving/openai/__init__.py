# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0
