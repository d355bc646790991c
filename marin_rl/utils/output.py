# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Output of commands: text that cannot control a terminal, and standard streams that may be closed or full.

A command that only prints ends as Unix tools do. A command that works for longer, such as a training run, goes on
without its output, and says so once in its log.
"""

import contextlib
import errno
import io
import logging
import os
import select
import signal
import sys
import unicodedata
from collections.abc import Iterator
from typing import Any, TextIO

logger = logging.getLogger(__name__)

_HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Control, format (bidirectional overrides, zero-width), surrogate, private, unassigned, line and paragraph
separators."""


def escape(text: str) -> str:
    r"""Replace invisible and control characters by escape sequences; keep newlines.

    >>> escape("a\x1b[31mred\u202eb\tc")
    'a\\x1b[31mred\\u202eb\\tc'
    """
    if text.isprintable():
        return text
    return "".join(
        character
        if character == "\n" or unicodedata.category(character) not in _HIDDEN_CATEGORIES
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def escape_line(text: str) -> str:
    r"""Like `escape`, but also replace newlines.

    >>> escape_line("a\nb")
    'a\\nb'
    """
    return escape(text).replace("\n", "\\n")


def replace_surrogates(text: str) -> str:
    r"""Replace lone surrogates, which UTF-8 cannot encode and tokenizers reject, by question marks.

    >>> replace_surrogates("a\ud800b")
    'a?b'
    """
    return text.encode("utf-8", "replace").decode("utf-8")


def shorten(text: str, length: int) -> str:
    """Leave out the middle of a text that has more than `length` characters; both ends of a prompt or reply matter.

    >>> shorten("Compute 12+34. Reply with the number only.", 21)
    'Compute 12…mber only.'
    """
    if len(text) <= length:
        return text
    end = (length - 1) // 2
    return f"{text[: length - 1 - end]}…{text[len(text) - end :]}"


def shown_bytes(piece: bytes) -> str:
    r"""Decode a token's bytes to one line of text; incomplete UTF-8 characters become byte escapes.

    >>> shown_bytes(b"5\n"), shown_bytes(b"\xc3")
    ('5\\n', '\\xc3')
    """
    return escape_line(piece.decode("utf-8", "backslashreplace"))


READER_GONE = 128 + signal.SIGPIPE
"""Exit status if the reader of standard output has closed it, as of a Unix tool that SIGPIPE ended."""


class OutputError(Exception):
    """Standard output cannot be written, and the command has no other purpose."""


class _Stream(io.RawIOBase):
    """Descriptor that discards its output after the first error."""

    def __init__(self, descriptor: int, name: str, *, required: bool) -> None:
        self._descriptor = descriptor
        self.name = name
        self.required = required
        self.error: OSError | None = None
        self.is_reported = False

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        whole = rest = memoryview(data).cast("B")
        while rest and self.error is None:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:
                # Another program has made the terminal or pipe non-blocking for all that share it.
                select.select((), (self._descriptor,), ())
            except OSError as error:
                self.error = error
                if self.required:
                    raise OutputError(self.problem) from error
        return len(whole)

    @property
    def problem(self) -> str:
        assert self.error is not None
        closed = self.error.errno == errno.EBADF
        return f"{self.name} cannot be written: {'it is closed' if closed else self.error.strerror}"


_guarded: list[_Stream] = []
"""Standard output and standard error of the running command; empty if they are not those of the process."""


@contextlib.contextmanager
def guarded_output() -> Iterator[None]:
    """Handle errors of standard output and standard error during a command. Errors of standard error are ignored.

    Has no effect on a stream that a caller has replaced.

    Raises:
        SystemExit: if standard output could not be written, unless `go_on_without_output` was called; status
            `READER_GONE` without a message, or 1 with a message on standard error.
    """
    originals = sys.stdout, sys.stderr
    if originals != (sys.__stdout__, sys.__stderr__):
        yield
        return
    _keep_free_descriptors()
    _guarded[:] = _Stream(1, "standard output", required=True), _Stream(2, "standard error", required=False)
    sys.stdout, sys.stderr = map(_text_stream, _guarded, originals)
    ending: SystemExit | None = None
    try:
        with contextlib.suppress(OutputError):
            yield
    except SystemExit as error:
        ending = error
    finally:
        _flush()
    failed = _guarded[0]
    if failed.error is None:
        sys.stdout, sys.stderr = originals
    elif failed.required and failed.error.errno == errno.EPIPE:
        raise SystemExit(READER_GONE)
    elif failed.required or not failed.is_reported:
        print(f"{'error' if failed.required else 'warning'}: {failed.problem}", file=sys.stderr, flush=True)
        if failed.required:
            raise SystemExit(1)
    if ending is not None:
        raise ending


def go_on_without_output() -> None:
    """Let the running command continue if its standard output cannot be written; called before long work."""
    for stream in _guarded:
        stream.required = False


def report_lost_output() -> None:
    """Log once that a standard stream could not be written; to be called from time to time, and not by the stream."""
    for stream in _guarded:
        if stream.error is not None and not stream.is_reported:
            stream.is_reported = True
            logger.warning("%s; the command goes on without it", stream.problem)


def _keep_free_descriptors() -> None:
    """Open the standard descriptors that are closed, or the next files and sockets would become standard output."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # Only for reading, so that a write is still an error.
            os.open(os.devnull, os.O_RDONLY)


def _text_stream(raw: _Stream, original: TextIO | None) -> TextIO:
    """Return a stream with the encoding and buffering of the original, which is None if it was closed."""
    unbuffered = isinstance(original, io.TextIOWrapper) and original.write_through
    return io.TextIOWrapper(
        # TextIOWrapper needs only the method `write` of a buffer; python -u builds its streams in the same way.
        raw if unbuffered else io.BufferedWriter(raw),  # pyrefly: ignore[bad-argument-type]
        encoding="utf-8" if original is None else original.encoding,
        # A reply may contain characters that the encoding of the terminal does not have.
        errors="backslashreplace",
        line_buffering=not isinstance(original, io.TextIOWrapper) or original.line_buffering,
        write_through=unbuffered,
    )


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OutputError, ValueError):
            stream.flush()
