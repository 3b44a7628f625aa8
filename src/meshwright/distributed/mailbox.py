"""Messages between the processes of a run, from any thread.

Collectives must run on the main thread, in the same order everywhere, so a save in the background cannot use them. The
messages go through the coordination service that the processes have joined.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_PART = 2**20
"""Bytes per message of the service, whose limit is 4 MiB."""


class Mailbox:
    """Named messages of a run. Each is written once; every process may read it.

    Args:
        name: prefix of the messages, the same on all processes.
    """

    def __init__(self, name: str) -> None:
        self.name = f"meshwright/{name}"

    def put(self, name: str, data: bytes) -> None:
        """Writes a message."""
        client, parts = _client(), [data[at : at + _PART] for at in range(0, len(data), _PART)]
        for number, part in enumerate(parts):
            client.key_value_set_bytes(f"{self.name}/{name}/{number}", part, allow_overwrite=True)
        # The number of parts comes last, so that readers see a whole message or none.
        client.key_value_set_bytes(f"{self.name}/{name}/parts", str(len(parts)).encode(), allow_overwrite=True)

    def get(self, name: str) -> bytes | None:
        """Returns a message, or None if there is none yet."""
        client = _client()
        try:
            count = int(client.key_value_try_get_bytes(f"{self.name}/{name}/parts"))
        except Exception as error:
            if "NOT_FOUND" in str(error):
                return None
            raise
        return b"".join(client.key_value_try_get_bytes(f"{self.name}/{name}/{number}") for number in range(count))

    def wait(self, name: str, *, seconds: float, check: Callable[[], None]) -> bytes:
        """Returns a message once it is there; raises `TimeoutError` after some seconds.

        Args:
            check: called before each look; raises if the message will never come.
        """
        deadline, pause = time.monotonic() + seconds, 0.01
        while (data := self.get(name)) is None:
            check()
            if time.monotonic() > deadline:
                raise TimeoutError(name)
            time.sleep(pause)
            pause = min(2 * pause, 0.25)
        return data

    def remove(self, name: str) -> None:
        """Removes a message, or all below a prefix."""
        _client().key_value_delete(f"{self.name}/{name}")


def _client() -> Any:
    from jax._src import distributed  # JAX has no public interface to it

    client = distributed.global_state.client
    assert client is not None, "only runs with several processes have a mailbox"
    return client
