"""The token of a run, which a process must know to take part in the roll call.

A launcher creates one token per run and gives it to every process, in the environment or in a file that only the user
can read. The token itself is never sent: each side proves that it knows it.
"""

from __future__ import annotations

import os
import secrets
import stat

from meshwright.errors import LaunchError

TOKEN = "MESHWRIGHT_TOKEN"
"""Environment variable that holds the token."""
TOKEN_FILE = "MESHWRIGHT_TOKEN_FILE"
"""Environment variable with the path of a file that holds the token."""

_FEWEST, _MOST = 16, 1024  # characters


def create_token() -> str:
    """Returns a new random token with 256 bits; set it as `MESHWRIGHT_TOKEN` for every process of one run.

    Example:
        >>> len(create_token()), create_token() == create_token()
        (64, False)
    """
    return secrets.token_hex(32)


def find_token() -> str | None:
    """Returns the token from `MESHWRIGHT_TOKEN` or the file `MESHWRIGHT_TOKEN_FILE`, or None if neither is set.

    Raises `LaunchError` for a weak token, and for a file that other users can read or replace.

    Example:
        >>> os.environ[TOKEN] = "correct horse battery staple"
        >>> find_token()
        'correct horse battery staple'
        >>> del os.environ[TOKEN]
    """
    given, path = os.environ.get(TOKEN), os.environ.get(TOKEN_FILE)
    if given is not None and path is not None:
        raise LaunchError(f"both {TOKEN} and {TOKEN_FILE} are set.", hint="unset one of them.")
    if given is not None:
        return _checked(given, TOKEN)
    return _checked(_read(path), path) if path is not None else None


def _read(path: str) -> str:
    try:
        # Without O_NONBLOCK, opening a FIFO waits for a writer.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            info = os.fstat(handle)
            if not stat.S_ISREG(info.st_mode):
                raise LaunchError(f"{TOKEN_FILE}={path} is not a regular file.", hint="write the token into a file.")
            if info.st_uid not in (os.geteuid(), 0) or stat.S_IMODE(info.st_mode) & 0o077:
                raise LaunchError(
                    f"other users can read or change {TOKEN_FILE}={path} (mode {stat.S_IMODE(info.st_mode):o}, owner "
                    f"{info.st_uid}).",
                    hint=f"run `chmod 600 {path}` as its owner, and create a new token.",
                )
            return os.read(handle, 4 * _MOST + 1).decode()
        finally:
            os.close(handle)
    except OSError as error:
        raise LaunchError(f"cannot read {TOKEN_FILE}={path}: {error.strerror}.", hint="check the path.") from None
    except UnicodeDecodeError:
        raise LaunchError(f"{TOKEN_FILE}={path} is not text.", hint="write the token as text.") from None


def _checked(text: str, where: str) -> str:
    token = text.strip()
    if not _FEWEST <= len(token) <= _MOST:
        raise LaunchError(
            f"the token in {where} has {len(token)} characters; it needs {_FEWEST} to {_MOST}.",
            hint='create one with `python -c "import secrets; print(secrets.token_hex(32))"`, the same for all ranks.',
        )
    return token
