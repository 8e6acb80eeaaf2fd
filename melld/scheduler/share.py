"""How much each client has been served, so that of those who wait the one that has had least goes first.

Owns one number per client: the KV bytes of its requests, prompts and growth, since it has been known.  Never orders
requests (`waiting` does) and knows no key: a client is a short name, empty where nobody asks for keys.

Source: the virtual token counter of "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024), with bytes
of KV in the place of tokens.  Who was away has saved nothing up: its number is lifted to that of who was served last.
"""

from collections.abc import Iterable


class FairShare:
    """The service of every client.  There are as many clients as keys."""

    def __init__(self) -> None:
        self._served_bytes: dict[str, int] = {}
        self._floor_bytes = 0
        """What the one had had who was last served, before it was: a newcomer begins here, and so goes first."""

    def served_bytes(self, client: str) -> int:
        """What the client is reckoned to have had."""
        return self._served_bytes.get(client, 0)

    def returns(self, client: str, waiting: Iterable[str]) -> None:
        """The client has had nobody waiting and now has; `waiting` are the clients who have."""
        least_bytes = min((self._floor_bytes, *map(self.served_bytes, waiting)))
        self._served_bytes[client] = max(self.served_bytes(client), least_bytes)

    def begin(self, client: str, kv_bytes: int) -> None:
        """A request of the client begins to be served: its prompt counts."""
        had_bytes = self.served_bytes(client)
        self._floor_bytes = max(self._floor_bytes, had_bytes)
        self._served_bytes[client] = had_bytes + kv_bytes

    def begin_alone(self, client: str, kv_bytes: int) -> None:
        """`returns` and `begin` in one, for when nobody waits."""
        self._floor_bytes = had_bytes = max(self._served_bytes.get(client, 0), self._floor_bytes)
        self._served_bytes[client] = had_bytes + kv_bytes

    def grow(self, client: str, kv_bytes: int) -> None:
        """A request of the client has grown by so much."""
        self._served_bytes[client] = self.served_bytes(client) + kv_bytes
