# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

# Otherwise pytest imports the stand-ins under the names of the packages.
collect_ignore = ["stand_ins"]
