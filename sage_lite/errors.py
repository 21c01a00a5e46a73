"""The exception for a mistake that the user can mend."""
from __future__ import annotations


class UserError(ValueError):
    """Something the user gave is wrong: the message names the value and says what to do.

    The command line prints it as a single line, without a traceback.
    """


class Diverged(UserError):
    """Training left the finite numbers; the message names the setting to lower."""
