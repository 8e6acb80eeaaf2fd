"""What a reload changes in a listening daemon, and what it must not.  The sockets are real; no engine is needed."""

import contextlib
import hashlib
import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from melld.api.keys import Client
from melld.config import Config, ModelConfig
from melld.config_server import ClientConfig, ServerConfig
from melld.control.messages import Reloaded
from melld.daemon.preflight import ready_text, url_of
from melld.daemon.settings import Settings, in_words
from melld.daemon.systemd import Supervision
from melld.errors import ConfigError

ANYWHERE = "0.0.0.0"  # noqa: S104  with a key, or refused


class Operator:
    """An operator who edits the configuration, and what the service manager passed."""

    def __init__(self, server: ServerConfig, supervision: Supervision | None = None) -> None:
        self.server = server
        self.supervision = supervision or Supervision()
        self.models: tuple[ModelConfig, ...] = ()

    def config(self) -> Config:
        model = self.models[0] if self.models else ModelConfig(path="model")
        return Config(model=model, models=self.models, server=self.server)

    def settings(self) -> contextlib.closing[Settings]:
        return contextlib.closing(Settings(self.config(), self.config, self.supervision))


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    """Return a file with two keys."""
    (tmp_path / "keys").write_text("one\ntwo\n")
    return tmp_path / "keys"


def replace(file: Path, text: str | None) -> None:
    """Replace the file's text, or put a FIFO in its place."""
    file.unlink()
    if text is None:
        os.mkfifo(file)
    else:
        file.write_text(text)


@contextlib.contextmanager
def handed_over(family: int, address: object) -> Iterator[Supervision]:
    """Return a listening socket opened by a service manager."""
    with socket.socket(family) as listener:
        listener.bind(address)
        listener.listen()
        yield Supervision(descriptors=(("api", os.dup(listener.fileno())),))


async def test_a_reload_cannot_open_the_api_to_the_network(key_file: Path) -> None:
    """The socket keeps listening on every address, whatever the new file says, so its keys stay."""
    operator = Operator(ServerConfig(host=ANYWHERE, port=0, api_key_file=str(key_file)))
    with operator.settings() as settings:
        for attempt in (
            ServerConfig(host="127.0.0.1", port=0),
            ServerConfig(host="127.0.0.1", port=0, allow_remote_without_key=True),
        ):
            operator.server = attempt
            with pytest.raises(ConfigError, match="reachable from other machines"):
                await settings.reload()
        assert settings.keys.client_of("one") is not None
        assert settings.keys.client_of(None) is None
        assert not settings.config.server.allow_remote_without_key


async def test_keys_may_be_dropped_on_loopback(key_file: Path) -> None:
    """Where nobody else can connect, the operator decides."""
    operator = Operator(ServerConfig(port=0, api_key_file=str(key_file)))
    with operator.settings() as settings:
        operator.server = ServerConfig(port=0)
        assert (await settings.reload()).keys_removed == 2
        assert settings.keys.client_of(None) is not None


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, ANYWHERE), (socket.AF_INET6, "::")])
async def test_a_service_manager_s_socket_is_judged_by_its_address(family: int, host: str, key_file: Path) -> None:
    """`ListenStream=0.0.0.0:8000` without a key is refused, at start and when a reload would drop the keys."""
    with handed_over(family, (host, 0)) as given, pytest.raises(ConfigError, match="reachable from other machines"):
        Operator(ServerConfig(), given).settings()
    with handed_over(family, (host, 0)) as given:
        operator = Operator(ServerConfig(api_key_file=str(key_file)), given)
        with operator.settings() as settings:
            operator.server = ServerConfig()
            with pytest.raises(ConfigError, match="reachable from other machines"):
                await settings.reload()
            assert settings.keys.client_of(None) is None


async def test_a_reload_counts_added_and_removed_keys(key_file: Path) -> None:
    """Whoever adds a key sees that it took effect; the log never shows one."""
    operator = Operator(ServerConfig(port=0, api_key_file=str(key_file)))
    with operator.settings() as settings:
        replace(key_file, "two\nthree\nfour\n")
        reloaded = await settings.reload()
        assert in_words(reloaded) == "API keys (2 added, 1 removed)"
        assert settings.keys.client_of("four") is not None
        assert in_words(await settings.reload()) == "no changes"


async def test_a_reload_gives_keys_names_and_rights(key_file: Path) -> None:
    """Priorities change while requests run; the log says that a key got a name, never which key."""
    operator = Operator(ServerConfig(port=0, api_key_file=str(key_file)))
    with operator.settings() as settings:
        named = ClientConfig(key=f"sha256:{hashlib.sha256(b'two').hexdigest()}", name="chat", priority=-1)
        operator.server = ServerConfig(port=0, api_key_file=str(key_file), clients=(named,))
        assert in_words(await settings.reload()) == "server.clients"
        found = [settings.keys.client_of(key) for key in ("one", "two")]
        assert found == [Client("key0", owner=hashlib.sha256(b"one").digest()), Client("chat", -1, None, b"chat")]


async def test_a_reload_changes_which_pages_may_call() -> None:
    """A page is let in or shut out while requests run."""
    operator = Operator(ServerConfig(port=0))
    with operator.settings() as settings:
        operator.server = ServerConfig(port=0, allowed_origins=("https://a.example",), allow_credentials=True)
        assert in_words(await settings.reload()) == "server.allowed_origins, server.allow_credentials"
        assert settings.config.server.allowed_origins == ("https://a.example",)


class Alone:
    """Return one model, `path`, which has all the devices."""

    is_alone = True

    async def prepare(self, config: Config) -> dict[str, Any]:
        return {model.path: None for model in config.models if model.path != "model"}

    def carry_out(self, config: Config, prepared: Mapping[str, Any]) -> Reloaded:
        removed = () if any(model.path == "model" for model in config.models) else ("model",)
        return Reloaded(models_added=tuple(prepared), models_removed=removed)


@pytest.mark.parametrize(
    ("listed", "applied", "needs_restart", "added", "removed"),
    [
        (("model", "other"), ("models",), (), ("other",), ()),
        (("other",), ("models",), (), ("other",), ("model",)),
        (("model",), (), ("models",), (), ()),
    ],
)
async def test_a_lone_model_may_get_neighbours_by_a_reload(
    listed: Sequence[str],
    applied: tuple[str, ...],
    needs_restart: tuple[str, ...],
    added: tuple[str, ...],
    removed: tuple[str, ...],
) -> None:
    """Turning `[model]` into `[[models]]` reports what was added and asks for no restart."""
    operator = Operator(ServerConfig(port=0))
    with operator.settings() as settings:
        models = tuple(ModelConfig(path=path, weight=2.0) for path in listed)
        operator.models = models
        told = await settings.reload(Alone())
    assert (told.applied, told.needs_restart) == (applied, needs_restart)
    assert (told.models_added, told.models_removed) == (added, removed)


def test_a_reload_reports_its_changes_in_words() -> None:
    """One line for the log."""
    both = Reloaded(applied=("server.drain_s",), needs_restart=("server.port",), keys_added=1)
    assert in_words(both) == "server.drain_s, API keys (1 added, 0 removed); at the next start: server.port"


async def test_the_credential_is_read_again(tmp_path: Path) -> None:
    """A service manager refreshes it by replacing the directory: keys rotate without a restart."""
    given = Supervision(credentials_directory=tmp_path / "credentials")
    operator = Operator(ServerConfig(port=0), given)
    with operator.settings() as settings:
        assert settings.keys.client_of(None) is not None
        (tmp_path / "fresh").mkdir()
        (tmp_path / "fresh" / "api-keys").write_text("fresh\n")
        (tmp_path / "fresh").rename(tmp_path / "credentials")
        await settings.reload()
        assert [settings.keys.client_of(key) is not None for key in ("fresh", None)] == [True, False]


async def test_a_reload_that_cannot_be_read_changes_nothing(key_file: Path) -> None:
    """A FIFO in the key file's place is refused at once, and the old keys remain valid."""
    operator = Operator(ServerConfig(port=0, api_key_file=str(key_file), drain_s=1.0))
    with operator.settings() as settings:
        replace(key_file, None)
        operator.server = ServerConfig(port=0, api_key_file=str(key_file), drain_s=2.0)
        with pytest.raises(ConfigError, match="not a regular file"):
            await settings.reload()
        assert settings.keys.client_of("two") is not None
        assert settings.config.server.drain_s == 1.0


async def test_a_reload_reads_files_off_the_loop(key_file: Path) -> None:
    """Files may be on a hanging disk: the streams go on all the same."""
    readers = []

    class Slow(Operator):
        def config(self) -> Config:
            readers.append(threading.current_thread())
            return super().config()

    with Slow(ServerConfig(port=0, api_key_file=str(key_file))).settings() as settings:
        readers.clear()
        await settings.reload()
    assert readers
    assert threading.current_thread() not in readers


@pytest.mark.parametrize(
    ("server", "is_told"),
    [
        (ServerConfig(), False),
        (ServerConfig(host="localhost", port=0), False),
        (ServerConfig(host="127.0.0.1", port=0), False),
        (ServerConfig(host="127.0.0.1", port=1), True),
        (ServerConfig(host="10.1.2.3", port=0, allow_remote_without_key=True), True),
    ],
)
def test_an_address_without_effect_is_reported(server: ServerConfig, is_told: bool) -> None:
    """Where the socket unit holds the address, `[server] host` and `port` are not silently ignored."""
    with handed_over(socket.AF_INET, ("127.0.0.1", 0)) as given, Operator(server, given).settings() as settings:
        assert [("127.0.0.1:" in remark) for remark in settings.remarks()] == [True] * is_told


def test_a_unix_socket_is_served_and_named(tmp_path: Path) -> None:
    """A socket unit with `ListenStream=/run/melld-api.sock` prints a command that works."""
    path = str(tmp_path / "api")
    with (
        handed_over(socket.AF_UNIX, path) as given,
        Operator(ServerConfig(), given).settings() as settings,
    ):
        url = url_of(settings.listeners)
        assert url == f"unix:{path}"
        said = ready_text(url, "demo", False, ("/v1/embeddings", ""), None)
        assert f"curl -s --unix-socket {path} http://localhost/v1/embeddings" in said
