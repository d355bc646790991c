# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A package, because one of the dependencies installs a package of the same name, which would be found instead."""
