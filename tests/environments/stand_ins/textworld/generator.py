# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

from typing import Any


def make_game(options: Any) -> Any:
    from textworld import Game

    return Game(options.nb_rooms + options.seeds % 50)
