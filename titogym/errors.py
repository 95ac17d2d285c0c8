"""The one exception that is meant for the person at the keyboard."""


class UserError(Exception):
    """Something the user can mend: the message is one clear sentence that says what to change.

    The CLI prints it without a traceback and exits with status 2.
    """
