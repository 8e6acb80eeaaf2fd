"""`melld serve` under a service manager: its start, a reload, and what a kill leaves."""

import asyncio
import hashlib
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import psutil
import pytest

from tests.api.http_client import COMPLETIONS, completion, request
from tests.patience import PATIENCE_S
from tests.serve.daemon_process import DaemonProcess
from tests.serve.manager import forget_heard, hear_until, manager_at
from tests.serve.test_serve import answer, is_gone, until

USED = "requests", "prompt_tokens", "output_tokens"
SOON_STOPPED = ("--set", "idle.sleep_after_s=0.5", "--set", "idle.stop_after_s=0.5")
READY, WAKES = re.compile(r"\((.*) s\)"), re.compile(r"wakes in about (\S+) s")


class Service(NamedTuple):
    """A daemon as a service manager starts it, and the manager's ends: its messages, the API's socket, the files."""

    daemon: DaemonProcess
    manager: socket.socket
    api: socket.socket
    waiting: socket.socket
    """A client that came before the daemon was ready."""
    configuration: Path
    keys: Path
    temporary: Path


GENUINE = pytest.param(True, marks=pytest.mark.long, id="genuine")
"""A daemon that makes its imports itself, as a user's does, and so does its workers' template."""


@pytest.fixture(scope="module", params=[pytest.param(False, id="forked"), GENUINE])
def service(
    request: pytest.FixtureRequest, demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    directory = tmp_path_factory.mktemp("service")
    configuration, keys, temporary = directory / "melld.toml", directory / "keys", directory / "tmp"
    configuration.write_text("[server]\ndrain_s = 1\n")
    keys.write_text("first-key\n")
    temporary.mkdir()
    flags = ("--device", "cpu:1", "--config", str(configuration), "--api-key-file", str(keys), *SOON_STOPPED)
    told = {"WATCHDOG_USEC": "20000000", "TMPDIR": str(temporary)}
    with socket.create_server(("127.0.0.1", 0)) as api, manager_at(directory / "notify") as manager:
        waiting = socket.create_connection(api.getsockname())
        told["NOTIFY_SOCKET"] = manager.getsockname()
        with DaemonProcess(demo_model, *flags, environment=told, handed=api, genuine=request.param) as daemon:
            yield Service(daemon, manager, api, waiting, configuration, keys, temporary)


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().strip("\0")


def files_in(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def ask(connection: socket.socket, key: str) -> str:
    """Return the status line for /v1/models on this connection, which is closed after it."""
    with connection:
        connection.settimeout(PATIENCE_S)
        head = f"GET /v1/models HTTP/1.1\r\nHost: melld\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n\r\n"
        connection.sendall(head.encode())
        return connection.makefile().readline()


def reload(service: Service) -> None:
    forget_heard(service.manager)
    service.daemon.process.send_signal(signal.SIGHUP)
    hear_until(service.manager, "RELOADING=1")
    hear_until(service.manager, "READY=1")


def test_the_daemon_is_ready_once_it_serves_on_the_given_socket(service: Service) -> None:
    """What depends on it starts at the right moment, and a restart refuses nobody."""
    heard = [service.manager.recv(4096).decode()]
    while "READY=1" not in heard[-1]:
        heard.append(service.manager.recv(4096).decode())
    assert any("WATCHDOG=1" in message for message in heard)
    assert ask(service.waiting, "first-key").startswith("HTTP/1.1 200")


@pytest.mark.parametrize("service", [GENUINE], indirect=True)
def test_the_first_start_s_imports_do_not_count_as_wake_time(service: Service) -> None:
    """The time of a wake decides who waits for it."""
    [ready_s] = READY.findall(service.daemon.wait_for("melld: w0 is ready"))
    asyncio.run(until(lambda: service.daemon.status()["workers"][0]["state"] == "stopped"))
    [wake_s] = WAKES.findall(service.daemon.status()["workers"][0]["why"])
    assert float(wake_s) < float(ready_s) / 1.5


def test_a_reload_changes_keys_and_a_bad_one_harms_nothing(service: Service) -> None:
    """The manager hears when it begins and when it is done."""
    service.keys.write_text("second-key\n")
    reload(service)
    service.daemon.wait_for("reloaded: API keys (1 added, 1 removed)")
    assert ask(socket.create_connection(service.api.getsockname()), "first-key").startswith("HTTP/1.1 401")
    before = service.configuration.read_text()
    service.configuration.write_text("[server]\nprt = 1\n")
    reload(service)
    assert "unknown key `prt`" in service.daemon.status()["warnings"][0]
    for origin in ("https://a.example", "https://b.example/"):  # the second is none
        service.configuration.write_text(f'[server]\nallowed_origins = ["{origin}"]\n')
        reload(service)
    url = f"http://127.0.0.1:{service.api.getsockname()[1]}"
    answer = request(url, "GET", "/v1/models", None, {"Origin": "https://a.example"})
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (401, "https://a.example")
    assert 'such as "https://b.example", not' in service.daemon.status()["warnings"][0]
    service.configuration.write_text(before)
    reload(service)
    assert ask(socket.create_connection(service.api.getsockname()), "second-key").startswith("HTTP/1.1 200")


def test_a_key_s_requests_are_as_urgent_as_its_client(service: Service) -> None:
    """From a reload on: by default, within its rights, and no further; other keys stay behind it."""
    digest = hashlib.sha256(b"chat-key").hexdigest()
    rights = f"key = 'sha256:{digest}'\nname = 'chat'\npriority = -1\nmin_priority = -5\n"
    service.configuration.write_text(f"[server]\ndrain_s = 1\n[[server.clients]]\n{rights}")
    reload(service)
    service.daemon.wait_for("reloaded: server.clients, API keys (1 added, 0 removed)")
    url = f"http://127.0.0.1:{service.api.getsockname()[1]}"

    used = dict.fromkeys(("chat-key", "second-key"), (0, 0, 0))

    def tier(key: str, **fields: Any) -> tuple[int, str | None]:
        answer = request(url, "POST", COMPLETIONS, completion(**fields), {"Authorization": f"Bearer {key}"})
        if usage := answer.json().get("usage"):
            counted, more = used[key], (1, usage["prompt_tokens"], usage["completion_tokens"])
            used[key] = counted[0] + more[0], counted[1] + more[1], counted[2] + more[2]
        return answer.status, answer.json().get("service_tier")

    asked: list[dict[str, Any]] = [{}, {"service_tier": "flex"}, {"service_tier": "priority"}, {"priority": -5}]
    assert [tier("chat-key", **fields) for fields in asked] == [
        (200, "priority"), (200, "flex"), (200, "priority"), (200, "priority")
    ]  # fmt: skip
    assert [tier("second-key", **fields) for fields in asked] == [
        (200, "default"), (200, "flex"), (200, "default"), (400, None)
    ]  # fmt: skip
    assert tier("chat-key", priority=-6) == (400, None)
    page = request(url, "GET", "/metrics", None, {"Authorization": "Bearer chat-key"}).body.decode()
    for key, client in (("chat-key", "chat"), ("second-key", "other")):  # what the answers said is what is billed
        found = re.findall(rf'^melld_client_(\w+)_total{{client="{client}",.*}} (.*)$', page, re.MULTILINE)
        assert {of: float(count) for of, count in found} == dict(zip(USED, used[key], strict=True))


def test_no_key_sees_another_key_s_answers(service: Service) -> None:
    """Even if their ids are known."""
    keys = service.keys.read_text().split()
    service.keys.write_text("\n".join(["third-key", *keys]))
    reload(service)
    url = f"http://127.0.0.1:{service.api.getsockname()[1]}"

    def told(method: str, path: str, key: str, **body: Any) -> tuple[int, Any]:
        answer = request(url, method, f"/v1/responses{path}", body or None, {"Authorization": f"Bearer {key}"})
        return answer.status, answer.json()

    status, answer = told("POST", "", keys[0], input="Hello", max_output_tokens=2)
    assert status == 200
    known = "/" + answer["id"]
    for method, path in (("GET", known), ("DELETE", known), ("POST", f"{known}/cancel")):
        assert told(method, path, "third-key")[0] == 404
    assert told("POST", "", "third-key", input="Hello", previous_response_id=answer["id"])[0] == 404
    service.keys.write_text("\n".join([*keys, "third-key"]))
    reload(service)
    assert told("GET", known, keys[0]) == (200, answer)
    assert told("GET", known, "third-key")[0] == 404
    service.keys.write_text(keys[0])
    reload(service)


async def test_workers_die_with_a_killed_daemon(service: Service) -> None:
    """No GPU memory is held by orphans, whatever killed the daemon, and no file is left; `ps` says who they are."""
    base = f"http://127.0.0.1:{service.api.getsockname()[1]}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key=service.keys.read_text().strip(), max_retries=0) as client:
        answering = asyncio.create_task(answer(client, 1, 10_000))
        await until(lambda: any(request["output_tokens"] for request in service.daemon.status()["requests"]))
        pids = [worker["pid"] for worker in service.daemon.status()["workers"]]
        assert [name_of(pid) for pid in pids] == ["melld: worker w0"]
        assert psutil.Process(pids[0]).children() == [], "nor has it another interpreter beside it"
        service.daemon.process.kill()
        with pytest.raises((httpx.HTTPError, openai.APIError)):
            await answering
    service.daemon.wait_end()
    await until(lambda: all(is_gone(pid) for pid in pids))
    assert files_in(service.temporary) == []
