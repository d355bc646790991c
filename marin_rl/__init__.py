# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import os

# Equinox's checks inside compiled programs are calls back to the host, and programs with those are compiled anew at
# every start. Here only levanter's inference engine has such checks, and the sampler looks at its answers itself.
os.environ.setdefault("EQX_ON_ERROR", "off")
