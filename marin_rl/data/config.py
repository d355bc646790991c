# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The section of a config that names supervised data."""

import dataclasses
import enum
from typing import Annotated

from annotated_types import Ge, Lt

from marin_rl.utils.settings.checks import ConfigSection, check_fields
from marin_rl.utils.settings.fields import LOCAL_PATH


class LongSequences(enum.StrEnum):
    """Handling of rows with a sequence that is longer than `max_length`."""

    ERROR = "error"
    """End the run, with the row and its length."""
    SKIP = "skip"
    """Leave out the row."""
    TRUNCATE = "truncate"
    """Cut the sequence after `max_length` tokens; leave out the row if no token with loss remains."""


@dataclasses.dataclass(frozen=True)
class DataConfig(ConfigSection):
    """Source of the rows, and of those that are held out."""

    path: str = dataclasses.field(metadata=LOCAL_PATH)
    """A JSONL file (`.jsonl`, `.jsonl.gz`), a Parquet file (`.parquet`), or a dataset in the format of Hugging Face: a
    name on the hub (`trl-lib/Capybara`), a folder of data files, or a folder written by `save_to_disk`."""
    subset: str | None = None
    """Configuration of a dataset that has several."""
    split: str = "train"
    """Split of a dataset."""
    revision: str | None = None
    """Commit or tag of a dataset on the hub; pin it to keep the data of an experiment fixed."""
    held_out: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Share of the rows that is held out, by hash of their content."""
    held_out_path: str | None = dataclasses.field(default=None, metadata=LOCAL_PATH)
    """Second source with the held-out rows, like `path`."""
    held_out_split: str | None = None
    """Split of a dataset with the held-out rows, such as `test`."""

    @property
    def holds_out(self) -> bool:
        """Whether rows are held out."""
        return bool(self.held_out or self.held_out_path or self.held_out_split)

    def __post_init__(self) -> None:
        check_fields(self)
        given = [
            f"{name} {value!r}"
            for name in ("held_out", "held_out_path", "held_out_split")
            if (value := getattr(self, name))
        ]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other; remove one")
