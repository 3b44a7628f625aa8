"""The process of the `meshwright` command, also as `python -m meshwright`.

It handles Ctrl-C before it imports anything: until then, Python itself would print a traceback. A parent that blocks
SIGINT before it starts this process, as `dev.py` does, closes that gap: the signal waits until the handler is there.
`_signal` is a part of the interpreter; the module `signal` around it takes longer to import than everything before it.
"""

import _signal  # type: ignore[import-not-found]
import os
import sys


def _end(number: int, frame: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(130)


def main() -> None:
    """Runs the command line of this process."""
    if _signal.getsignal(_signal.SIGINT) != _signal.SIG_IGN:
        _signal.signal(_signal.SIGINT, _end)
    if hasattr(_signal, "pthread_sigmask"):
        _signal.pthread_sigmask(_signal.SIG_UNBLOCK, [_signal.SIGINT])
    if sys.argv[1:2] != ["launch"]:  # whose own handlers stop all ranks
        from meshwright.interrupts import guard_process

        guard_process(sys.argv[1:])
    from meshwright.cli import main as run

    try:
        run()
    except SystemExit as ended:
        _leave(ended.code)


def _leave(code: object) -> None:
    """Ends the process as Python would, but without tearing down modules, during which Python ignores our handlers."""
    import atexit
    import threading

    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    main()
