"""Priority classes of requests, and what the scheduler does for each.

    high     priority below 0: an interactive chat, say
    normal   0
    low      above 0: a batch job

Owns the settings and the arithmetic of classes.  Never orders requests (`waiting` does) and never chooses a worker.
"""

import enum

import msgspec

HIGH, NORMAL, LOW = -1, 0, 1
STAYS_S = {HIGH: 4.0, NORMAL: 0.0, LOW: -2.0}
"""Extra life of its worker that moving one of the class must gain (`mell-plus`)."""
CLASSES = {"high": HIGH, "normal": NORMAL, "low": LOW}


class Priorities(msgspec.Struct, frozen=True):
    """Settings.

    `headroom`: the part of a worker's room, and of the pace, that others leave to urgent ones there, as long as they
    find a place elsewhere.  `age_s`: a request that has waited so long counts as of the next class above its own, and
    so on without end.  `hole_s`: how long moves may take that make room for a large request at the head of the line.
    `suspend`: where room for a high one cannot be made so, a low one is suspended.
    """

    headroom: float = 0.25
    age_s: float = 60.0
    hole_s: float = 2.0
    suspend: bool = True

    def level(self, priority: int, waited_s: float) -> int:
        """Return a waiting request's urgency, lower first: its class minus its age."""
        return class_of(priority) - int(waited_s // self.age_s)


def class_of(priority: int) -> int:
    """Return the class of a request with that priority: `HIGH`, `NORMAL` or `LOW`."""
    return (priority > 0) - (priority < 0)


class Tier(enum.StrEnum):
    """Urgency of a request, as OpenAI's APIs name it."""

    PRIORITY = "priority"  # goes first: its `priority` is below 0
    DEFAULT = "default"  # its `priority` is 0
    FLEX = "flex"  # goes last: its `priority` is above 0


def tier_of(priority: int) -> Tier:
    """Return the tier of a request with this priority."""
    return Tier.PRIORITY if priority < 0 else Tier.FLEX if priority else Tier.DEFAULT
