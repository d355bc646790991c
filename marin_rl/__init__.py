# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import importlib.util
import logging
import os

__version__ = "0.1.0"

# Equinox's runtime checks are host callbacks, and programs with host callbacks are not kept in the compilation cache.
os.environ.setdefault("EQX_ON_ERROR", "off")

# XLA's alarm about compilations of more than two minutes is logged as an error, and only the level of the log hides it.
# Without a plugin for accelerators nothing is lost: errors are exceptions in Python, or fatal, which is logged.
if not any(map(importlib.util.find_spec, ("jax_plugins", "libtpu"))):
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

# Transformers 5 says so when it is imported; models here need no PyTorch.
logging.getLogger("transformers").addFilter(lambda record: not record.getMessage().startswith("PyTorch was not found"))
