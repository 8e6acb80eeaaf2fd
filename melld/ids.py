"""Types of names and ids: plain strings and numbers at run time, distinct types for the checker.

A worker is not a device, and its name does not give a GPU's index: only the supervisor maps one to the other.
"""

from typing import NewType

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
EventId = NewType("EventId", int)
ModelName = NewType("ModelName", str)
DeviceName = NewType("DeviceName", str)
NO_EVENT = EventId(0)
"""The id of an unnumbered event, and the cause of events that no decision caused."""
