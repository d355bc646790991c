# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Model architectures: those that train and sample, and their Hugging Face configs and weight files."""
