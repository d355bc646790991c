# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import logging
import os

__version__ = "0.1.0"

# Equinox's runtime checks are host callbacks, and programs with host callbacks are not kept in the compilation cache.
os.environ.setdefault("EQX_ON_ERROR", "off")

# Transformers 5 says so when it is imported; models here need no PyTorch.
logging.getLogger("transformers").addFilter(lambda record: not record.getMessage().startswith("PyTorch was not found"))
