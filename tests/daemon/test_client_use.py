"""Each client's use: a bill adds up to what its answers reported."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from melld.daemon.history import OTHERS, ClientUse
from melld.ids import RequestId, WorkerId
from melld.scheduler import events
from melld.scheduler.reasons import Reason

NAMES = ("chat", "batch")
clients = st.sampled_from((*NAMES, "key0", "key1", "", "other"))


def arrive(use: ClientUse, name: str, client: str, prompt: int, *commands: events.AnyCommand) -> None:
    use.heard(events.RequestArrived(1.0, RequestId(name), 1, prompt, client=client), commands)


def place(name: str) -> events.PlaceRequest:
    return events.PlaceRequest(Reason.ARRIVAL, RequestId(name), WorkerId("w0"))


def finish(use: ClientUse, name: str, tokens: int) -> None:
    use.heard(events.RequestFinished(2.0, RequestId(name), tokens), ())


@given(st.lists(st.tuples(clients, st.integers(0, 999), st.integers(0, 999))))
def test_every_token_counts_once_for_a_known_name_or_for_others(made: list[tuple[str, int, int]]) -> None:
    """However many keys there are, there are as many series as configured names, plus one."""
    use = ClientUse(lambda: NAMES)
    for number, (client, prompt, output) in enumerate(made):
        arrive(use, str(number), client, prompt, place(str(number)))
        use.heard(events.RequestFinished(2.0, RequestId(str(number)), output), ())
        finish(use, str(number), output)  # of a request that has ended, or was never seen
    assert set(use.by_client) <= {*NAMES, OTHERS}
    for name in (*NAMES, OTHERS):
        theirs = [one for one in made if (one[0] if one[0] in NAMES else OTHERS) == name]
        sums = len(theirs), sum(one[1] for one in theirs), sum(one[2] for one in theirs)
        assert dataclasses.astuple(use.by_client[name]) == sums


def test_an_unserved_request_is_not_billed() -> None:
    """One that was shed, or left before a worker was free, has used nothing."""
    use = ClientUse(lambda: NAMES)
    arrive(use, "shed", "chat", 10, events.ShedRequest(Reason.QUEUE_FULL, RequestId("shed")))
    arrive(use, "left", "chat", 10, events.QueueRequest(Reason.ARRIVAL, RequestId("left")))
    arrive(use, "resumes", "chat", 10, place("resumes"))
    use.heard(events.EpochStarted(1.5), [place("resumes")])
    for name, tokens in (("shed", 0), ("left", 0), ("resumes", 7)):
        finish(use, name, tokens)
    assert {name: dataclasses.astuple(sums) for name, sums in use.by_client.items()} == {"chat": (1, 10, 7)}


def test_a_new_name_counts_from_its_reload_on() -> None:
    """Earlier counts stay where they were: a counter never falls."""
    names = ["chat"]
    use = ClientUse(lambda: names)
    for name in ("before", "after"):
        arrive(use, name, "batch", 1, place(name))
        finish(use, name, 1)
        names.append("batch")
    assert {name: sums.requests for name, sums in use.by_client.items()} == {OTHERS: 1, "batch": 1}
