"""API keys and their files: what grants access, and what is refused before it could mislead."""

import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from melld.api.keys import MAX_FILE_BYTES, Client, Keys, load_keys, parse_keys, presented_key
from melld.config_server import ClientConfig, ServerConfig
from melld.errors import ConfigError

KEY = "sk-a-key-that-nobody-may-see"


def digest_of(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return the path of a key file that does not exist yet."""
    return tmp_path / "keys"


def load(file: Path) -> Keys:
    return load_keys(ServerConfig(api_key_file=str(file)))


def refusal(file: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        load(file)
    return str(refused.value)


def test_plain_keys_and_digests_both_grant_access(file: Path) -> None:
    """A file may hold either; the configuration holds only digests."""
    file.write_text(f"# ours\r\none\n\n{digest_of('two')}\n{digest_of('four').upper()}\n")
    keys = load_keys(ServerConfig(api_key_file=str(file), api_keys=(digest_of("three"),)))
    assert [keys.client_of(key) is not None for key in ("one", "two", "three", "four")] == [True] * 4
    assert [keys.client_of(key) is not None for key in ("", "five", digest_of("two"), None)] == [False] * 4


def test_no_key_is_needed_where_none_is_set() -> None:
    """A newcomer on loopback just asks."""
    assert not Keys()
    assert Keys({b"digest": Client("key0")})
    assert Keys().client_of(None) is not None


def test_an_empty_or_missing_key_file_is_an_error(file: Path) -> None:
    """An empty file must not mean an open door."""
    assert "cannot be read" in refusal(file)
    file.write_text("# nothing\n")
    assert "contains no key" in refusal(file)


@pytest.mark.parametrize("line", ["sha256:zz", "sha256:", f"SHA256:{'0' * 63}", f"{digest_of(KEY)} # for the office"])
def test_a_broken_digest_names_its_line_and_is_no_key(file: Path, line: str) -> None:
    """A typo in a digest must not become a key that anybody can read off the file."""
    file.write_text(f"# ours\n{KEY}\n{line}\n")
    assert f"{file}, line 3" in refusal(file)
    assert KEY not in refusal(file)


@pytest.mark.parametrize("text", ["a\0b", "a\x1b[2Jb", "a\u200bb", "a\rb", "one\n\ufefftwo"])
def test_a_key_that_no_client_can_send_is_refused(text: str) -> None:
    """Stray characters from an editor or a wrong encoding are found at load time, not when nobody gets in."""
    with pytest.raises(ConfigError, match="line"):
        parse_keys(text, "keys")


def test_a_byte_order_mark_hides_no_key(file: Path) -> None:
    """A file saved by a Windows editor holds the same keys."""
    file.write_bytes(b"\xef\xbb\xbf" + KEY.encode())
    assert load(file).client_of(KEY) is not None


def test_a_file_that_is_not_utf_8_is_refused_without_showing_it(file: Path) -> None:
    """Not even a byte of a key goes to the log."""
    file.write_bytes(KEY.encode("utf-16"))
    assert "not UTF-8 text" in refusal(file)


def test_only_a_regular_file_is_read(file: Path) -> None:
    """A FIFO that nobody writes to would keep a reload waiting for ever."""
    os.mkfifo(file)
    assert "not a regular file" in refusal(file)
    file.unlink()
    file.mkdir()
    assert "Is a directory" in refusal(file)


def test_an_oversized_key_file_is_not_read(file: Path) -> None:
    """A wrong path must not fill the memory."""
    with file.open("w") as made:
        made.truncate(MAX_FILE_BYTES + 1)
    assert "larger than" in refusal(file)


def test_the_systemd_credential_is_optional_and_counts_too(file: Path, tmp_path: Path) -> None:
    """The shipped unit passes an empty credential where there is no key file."""
    assert not load_keys(ServerConfig(), file)
    file.write_text("\n")
    assert not load_keys(ServerConfig(), file)
    file.write_text("handed\n")
    own = tmp_path / "own"
    own.write_text("own\n")
    keys = load_keys(ServerConfig(api_key_file=str(own)), file)
    assert [keys.client_of(key) is not None for key in ("handed", "own", "other")] == [True, True, False]


def test_a_client_has_its_key_s_name_and_rights(file: Path) -> None:
    """A key that is also in the file gets them as well; one without a name is known by its number."""
    file.write_text("one\ntwo\n")
    chat = ClientConfig(key=digest_of("two"), name="chat", priority=-1)
    batch = [ClientConfig(key=digest_of(key), name="batch", min_priority=1) for key in ("three", "four")]
    keys = load_keys(ServerConfig(api_key_file=str(file), clients=(chat, *batch)))
    found = [keys.client_of(key) for key in ("one", "two", "three", "four", "five")]
    numbered = Client("key0", owner=hashlib.sha256(b"one").digest())
    assert found == [numbered, Client("chat", -1, None, b"chat"), *[Client("batch", None, 1, b"batch")] * 2, None]
    assert keys.count() == 3


@given(st.text())
def test_any_text_gives_keys_or_names_a_line(text: str) -> None:
    """A file chosen by mistake is an operator error, never an internal one."""
    try:
        digests = parse_keys(text, "keys")
    except ConfigError as error:
        assert error.where.startswith("keys, line ")  # noqa: PT017  either is right
    else:
        assert all(len(digest) == 32 for digest in digests)


@pytest.mark.parametrize(
    ("authorization", "x_api_key", "key"),
    [
        ("Bearer one", None, "one"),
        ("bearer  one ", "two", "one"),
        ("Basic one", "two", "two"),
        ("Basic one", None, None),
        ("Bearer ", "two", "two"),
        (None, "two", "two"),
        (None, None, None),
    ],
)
def test_a_key_is_accepted_in_openai_s_and_anthropic_s_header(
    authorization: str | None, x_api_key: str | None, key: str | None
) -> None:
    """Another scheme is no key of ours."""
    assert presented_key(authorization, x_api_key) == key
