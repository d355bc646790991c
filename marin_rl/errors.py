# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Errors that command lines report by their message, without a traceback."""


class UserError(RuntimeError):
    """Base class of errors with a message that names the cause and the remedy."""


USER_ERRORS = (UserError, ValueError, OSError)
"""Errors that a command line prints as one line; a traceback would hide the message."""
