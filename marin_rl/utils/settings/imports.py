# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Imports of a config: Python files and modules of users that register types, imported before the config is decoded."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from marin_rl.utils.settings.fields import local_path
from marin_rl.utils.settings.section_types import ConfigError
from marin_rl.utils.user_code import UserFileError, import_file, import_module, is_module_name

IMPORTS = "imports"
"""Key of the list; a config class with this field can be written with types that the files register."""


def import_types(config_class: Any, layers: Sequence[Mapping[str, Any]]) -> None:
    """Import what the key `imports` names, so that the types that it registers can be decoded; each once per process.

    Args:
        config_class: class of the config; nothing happens if it has no such key.
        layers: raw values of the config, from the lowest precedence to the highest. As for any list, only the last one
            counts. A value that is not a list of texts is left to `decode`, which reports it.

    Raises:
        ConfigError: if a file or module is missing or its import raises; the message has a line for each.
    """
    if IMPORTS not in {field.name for field in dataclasses.fields(config_class)}:
        return
    named = [layer[IMPORTS] for layer in layers if IMPORTS in layer][-1:]
    texts = [str(text) for texts in named if isinstance(texts, list) for text in texts if isinstance(text, str | int)]
    problems = []
    for text in texts:
        try:
            if is_module_name(text):
                import_module(text)
            else:
                local_path(text, IMPORTS)
                import_file(text)
        except UserFileError as error:
            problems.append(f"{IMPORTS}: {error}")
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(*problems)
