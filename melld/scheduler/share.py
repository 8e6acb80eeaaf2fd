"""Service counters of the clients: among waiting clients, the one with the least service goes first.

Owns one number per client: the KV bytes of all its requests so far, prompts and growth.  Never orders requests
(`waiting` does) and knows no API key: a client is a short name, empty without keys.

Source: the virtual token counter of "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024), with KV
bytes instead of tokens.  Absence earns no credit: a returning client's number is lifted to that of the client served
last.
"""

from collections.abc import Iterable


class FairShare:
    """Service of every client.  There are as many clients as keys."""

    def __init__(self) -> None:
        self._served_bytes: dict[str, int] = {}
        self._floor_bytes = 0
        """Service of the client served last, before that: a newcomer begins here, and so goes first."""

    def served_bytes(self, client: str) -> int:
        """Return the client's service so far, in KV bytes."""
        return self._served_bytes.get(client, 0)

    def returns(self, client: str, waiting: Iterable[str]) -> None:
        """Lift the number of a client that begins to wait; `waiting`: the clients that already wait."""
        least_bytes = min((self._floor_bytes, *map(self.served_bytes, waiting)))
        self._served_bytes[client] = max(self.served_bytes(client), least_bytes)

    def begin(self, client: str, kv_bytes: int) -> None:
        """Count the prompt of a client's request that begins to be served."""
        had_bytes = self.served_bytes(client)
        self._floor_bytes = max(self._floor_bytes, had_bytes)
        self._served_bytes[client] = had_bytes + kv_bytes

    def begin_alone(self, client: str, kv_bytes: int) -> None:
        """Do `returns` and `begin` in one call, for an empty queue."""
        self._floor_bytes = had_bytes = max(self._served_bytes.get(client, 0), self._floor_bytes)
        self._served_bytes[client] = had_bytes + kv_bytes

    def grow(self, client: str, kv_bytes: int) -> None:
        """Count the growth of a client's request."""
        self._served_bytes[client] = self.served_bytes(client) + kv_bytes
