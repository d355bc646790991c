# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Programs that tests start with the SDK of Tinker, which the environment of the tests may lack."""

collect_ignore = ["sdk_client.py", "sdk_losses.py"]
