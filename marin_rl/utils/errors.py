# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Errors that command lines report without a traceback, their messages, and writing and closing.

Processes of the sandbox import this module, so it loads only the standard library.
"""

import contextlib
import dataclasses
import difflib
import itertools
import linecache
import logging
import os
import re
import site
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Set
from pathlib import Path
from types import TracebackType

import marin_rl


class UserError(RuntimeError):
    """Base class of errors with a message that names the cause and the remedy."""


class RunDirectoryError(UserError):
    """A run directory cannot be used. The message names the directory and the remedy."""


MAX_DESCRIPTION = 2000
"""Maximum characters of the description of an error."""


def describe(error: BaseException) -> str:
    r"""Return type and message of an error that other people's code raised, as text that can be stored and logged.

    Their `__str__` may itself raise anything, and return text of any length, with lone surrogates.

    >>> describe(KeyError("lost")), describe(ValueError("a\ud800")), describe(KeyboardInterrupt())
    ("KeyError: 'lost'", 'ValueError: a\\ud800', 'KeyboardInterrupt')
    """
    name = "an error"
    try:
        name = type(error).__name__
        # Not `error.args` or slices of subclasses of `str`, which are other people's code again.
        text = str.__getitem__(f"{name}: {error}", slice(MAX_DESCRIPTION + 1)).removesuffix(": ")
    except BaseException as failed:
        text = f"{name}: <its message cannot be read: {type(failed).__name__}>"
    return storable(text, MAX_DESCRIPTION)


MAX_FRAMES = 8
"""Maximum frames of one error that `explain` lists: the outermost and the innermost ones."""

MAX_LINKED_ERRORS = 4
"""Maximum errors that `explain` lists below the first one."""


def explain(error: BaseException, description: str | None = None) -> str:
    """Return the description of an error that other people's code raised, and where it was raised in that code.

    The first line is the description. The frames of the code follow, one a line as `file:line, in function: source`.
    Those of this package, of installed packages and of Python are omitted. The causes of the error, and the errors of
    an exception group, follow in the same form. The description is by default `describe(error)`.
    """
    lines = [describe(error) if description is None else description]
    # An error's attributes are other people's code too.
    with contextlib.suppress(BaseException):
        lines += own_frames(error)
        for relation, linked in itertools.islice(_linked_errors(error), MAX_LINKED_ERRORS):
            description, frames = describe(linked), own_frames(linked)
            # The message of an error can quote the explanation of its cause.
            if not all(part in "\n".join(lines) for part in (description, *frames)):
                lines += [f"{relation} {description}", *frames]
    return "\n".join(lines)


def _linked_errors(error: BaseException) -> Iterator[tuple[str, BaseException]]:
    """The causes of an error and the errors in a group, each once, with their relation to the error before."""
    known, waiting = {id(error)}, [error]
    while waiting:
        last = waiting.pop(0)
        handled = None if last.__suppress_context__ else last.__context__
        # Causes that no code of the user raised or handled do not concern the user.
        linked = [
            (relation, found)
            for relation, found in (("caused by", last.__cause__), ("while handling", handled))
            if found is not None and own_frames(found)
        ]
        if isinstance(last, BaseExceptionGroup):
            linked += [("containing", part) for part in last.exceptions]
        for relation, found in linked:
            if id(found) not in known:
                known.add(id(found))
                waiting.append(found)
                yield relation, found


def own_frames(error: BaseException) -> list[str]:
    """Return the frames of the user's code, outermost first, and for an invalid syntax its place; see `explain`."""
    places = [
        (frame.f_code.co_filename, line, frame.f_code.co_qualname)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    if isinstance(error, SyntaxError) and linecache.getline(str(error.filename), int(error.lineno or 0)):
        places.append((str(error.filename), int(error.lineno or 0), "<module>"))
    frames = [_frame(file, line, function) for file, line, function in places if _is_own(file, function)]
    if len(frames) > MAX_FRAMES:
        half, omitted = MAX_FRAMES // 2, len(frames) - MAX_FRAMES
        frames = [*frames[:half], f"  ... {omitted} more frames ...", *frames[-half:]]
    return frames


def _frame(file: str, line: int, function: str) -> str:
    source = linecache.getline(file, line).strip()
    place = f"{file}:{line}" + ("" if function == "<module>" else f", in {function}")
    return "  " + storable(f"{place}: {source}" if source else place, MAX_FRAME).replace("\n", " ")


MAX_FRAME = 300
"""Maximum characters of the description of a frame."""

_FOREIGN_FOLDERS = tuple(
    os.path.join(folder, "")
    for folder in (
        *marin_rl.__path__,
        os.path.dirname(os.__file__),
        *site.getsitepackages(),
        site.getusersitepackages(),
    )
)
"""Folders of this package, of Python and of installed packages."""


def _is_own(file: str, function: str) -> bool:
    if file == "<string>":
        # Text that the user's code executes, or a method that `dataclasses` generates.
        return not function.startswith("__create_fn__")
    # Other names in brackets, such as `<frozen importlib>`, are of Python and packages.
    return not file.startswith(("<", *_FOREIGN_FOLDERS))


def storable(text: str, max_characters: int) -> str:
    r"""Return text without lone surrogates, of at most `max_characters` characters and a mark.

    >>> storable("a\ud800bc", 3)
    'a\\ud800b…'
    """
    cut = text[:max_characters] + ("…" if len(text) > max_characters else "")
    return cut.encode("utf-8", "backslashreplace").decode("utf-8")


MAX_NAME = 200
"""Maximum characters of a name in a message."""
MAX_MESSAGE_LINE = 4000
"""Maximum characters of a line of a message; a config with many mistakes has a line for each."""


def brief(message: str) -> str:
    """Cut the names in a message, which a file or a client may have made as long as its memory."""
    lines = re.sub(rf"[^\s'\"]{{{MAX_NAME + 1},}}", lambda name: f"{name[0][:MAX_NAME]}…", message).split("\n")
    return "\n".join(storable(line, MAX_MESSAGE_LINE) for line in lines)


USER_ERRORS = (UserError, ValueError, OSError)
"""Errors that a command line prints as one line; a traceback would hide the message."""


LISTED_NAMES = 12
"""Maximum valid names that an error message lists next to the nearest ones."""


def install_command(extra: str) -> str:
    """Return the command that installs an extra of this package, which is on no index.

    >>> install_command("serve")
    "pip install -e '.[serve]' in the checkout"
    """
    return f"pip install -e '.[{extra}]' in the checkout"


def nearest(name: str, valid: Iterable[str], heading: str = "Valid here") -> str:
    """Suggestion for an error message: the nearest valid names, and all of them if they are few or none is near.

    `heading` is the text before the list of all names.

    >>> nearest("sede", ["seed", "steps"])
    "did you mean 'seed'? Valid here: seed, steps"
    """
    names = [str(candidate) for candidate in valid]
    listing = f"{heading}: {', '.join(names)}" if names else "Nothing is valid here"
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    close = close or difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.6)
    close += [full for full in names if full not in close and name == "".join(word[:1] for word in full.split("_"))]
    if not close:
        return listing
    suggestion = f"did you mean {' or '.join(map(repr, close))}?"
    return f"{suggestion} {listing}" if len(names) <= LISTED_NAMES else suggestion


def nearest_file(path: Path, suffixes: Set[str]) -> str:
    """Suggestion for an error message: the files next to a path that does not exist.

    `suffixes` are those of the files to suggest, such as `.yaml`.
    """
    if not path.parent.is_dir():
        return f"neither does its folder {str(path.parent)!r}"
    names = sorted(entry.name for entry in path.parent.iterdir() if entry.suffix in suffixes)
    if not names:
        kind = "no YAML file" if ".yaml" in suffixes else f"no file *{min(suffixes)}"
        return f"there is {kind} in {str(path.parent)!r}"
    return nearest(path.name, names, heading=f"In {str(path.parent)!r}")


def require_threads(count: int) -> None:
    """Check that this user can start threads, without which libraries abort the process or wait forever.

    `count` is the number of further ones, processes included.

    Raises:
        UserError: if fewer can be started.
    """
    release = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(count):
            thread = threading.Thread(target=release.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        raise UserError(
            f"this user can start only {len(started)} more threads and processes here, which is too few; raise the "
            f"limit (`ulimit -u`, or the limit of the container) by at least {count - len(started)}"
        ) from error
    finally:
        release.set()
        for thread in started:
            thread.join()


logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Closing:
    """Call `close` at the end of a `with` block.

    If the block raises, its error propagates, and an error of `close` is only logged.

    >>> with Closing(lambda: print("closed")):
    ...     print("at work")
    at work
    closed
    """

    close: Callable[[], None]
    """Called once, at the end of the block."""

    def __enter__(self) -> None:
        """Enter the block."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Call `close`; log its error if the block raised one."""
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception:
            logger.exception("closing after an error (%s: %s) failed too", type(error).__name__, error)
