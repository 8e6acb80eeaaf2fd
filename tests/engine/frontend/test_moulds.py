"""What streams learn from those before."""

from melld.engine.frontend.moulds import MOST_KNOWN, KnownMoulds, Mould


def mould(name: str) -> Mould:
    return Mould((f'{{"id":"{name}","text":"'.encode(), b'"}'), None)


def test_ids_that_clients_choose_neither_fill_the_memory_nor_end_the_learning() -> None:
    """Only ids of hex digits are told apart from an event's form."""
    known = KnownMoulds()
    assert not known.trusts(mould("mine"), None, is_proved=False)
    for number in range(3 * MOST_KNOWN):
        known.trusts(mould(f"z{number:o}".translate(str.maketrans("01234567", "ghijklmn"))), None, is_proved=True)
    assert len(known._common) <= MOST_KNOWN
    assert known.trusts(mould("mine"), None, is_proved=True)
    assert known.trusts(mould("mine"), None, is_proved=False)
