"""Real clients against a daemon: `make clients`, or `make clients ARGS="codex llm --record DIRECTORY"` for some.

Each does three tasks: a tool call in a stream, a stream that is left, and a stream whose worker is killed.  Prints
the rows of a table and exits with 1 if any failed.
"""

import argparse
import asyncio
import base64
import contextlib
import json
import os
import re
import signal
import string
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.clients.agents import AGENTS
from tests.clients.reciting_model import FILE, NUMBERS, WRITTEN, make_reciting_model
from tests.clients.recorder import Recorder
from tests.serve.daemon_process import DaemonProcess

HERE, LOCKS = Path(__file__).parent, Path("locks/clients")
PLACE = Path(".clients").resolve()
"""Where `make clients` has installed them."""
PATIENCE_S = 180
PROMPTS = {
    "tool": "How many degrees has Rome? Ask with the tool.",
    "left": "Recite the numbers.",
    "death": "Recite the numbers.",
}
WRITE = f"Write {WRITTEN} into {FILE}."
SIGN = b" 45"
"""In an answer: it is in its middle."""
LEFT_AFTER = 40


class Client(NamedTuple):
    """A client: where it is installed, its package, and its script or, without one, its entry in `AGENTS`."""

    place: str
    package: str
    script: str = ""
    more: tuple[str, ...] = ()


CLIENTS = {
    "openai": Client("sdks", "openai", "openai_chat.py"),
    "openai responses": Client("sdks", "openai", "openai_responses.py"),
    "openai js": Client("node", "openai", "openai_chat.mjs"),
    "anthropic": Client("sdks", "anthropic", "anthropic_messages.py"),
    "anthropic js": Client("node", "@anthropic-ai/sdk", "anthropic_messages.mjs"),
    "langchain-openai": Client("sdks", "langchain-openai", "langchain_chat.py"),
    "langchain-anthropic": Client("sdks", "langchain-anthropic", "langchain_chat.py", ("anthropic",)),
    "litellm": Client("sdks", "litellm", "litellm_chat.py"),
    "pydantic-ai": Client("sdks", "pydantic-ai-slim", "pydantic_ai_agent.py"),
    "openai-agents": Client("sdks", "openai-agents", "openai_agents.py"),
    "smolagents": Client("sdks", "smolagents", "smolagents_agent.py"),
    "instructor": Client("instructor", "instructor", "instructor_object.py"),
    "vercel ai": Client("node", "@ai-sdk/openai-compatible", "vercel_ai.mjs"),
    "llm": Client("sdks", "llm"),
    "aider": Client("aider", "aider-chat"),
    "codex": Client("node", "@openai/codex"),
    "claude": Client("node", "@anthropic-ai/claude-code"),
    "opencode": Client("node", "opencode-ai"),
    "qwen": Client("node", "@qwen-code/qwen-code"),
    "pi": Client("node", "@mariozechner/pi-coding-agent"),
}


class Run(NamedTuple):
    """A task that was done: what the client printed, what it asked, and what is wrong."""

    wrong: str
    output: str
    recorder: Recorder


def version(client: Client) -> str:
    """Return the version that the lock pins."""
    if client.place == "node":
        return str(json.loads((LOCKS / "package.json").read_text())["dependencies"][client.package])
    found = re.search(rf"^{client.package}==(\S+)", (LOCKS / f"{client.place}.txt").read_text(), re.MULTILINE)
    return found[1] if found else "?"


def command(name: str, prompt: str, stop_after: int, url: str, home: Path) -> tuple[list[str], dict[str, str]]:
    """Return a client's words and variables, and write its files into its home."""
    client = CLIENTS[name]
    programs = PLACE / client.place / ("node_modules/.bin" if client.place == "node" else "bin")
    kept = {
        key: value for key, value in os.environ.items() if not re.match(r"PYTHON|OPENAI|ANTHROPIC|VIRTUAL_ENV", key)
    }
    variables = kept | {"HOME": str(home), "PATH": f"{programs}:{os.environ['PATH']}", "PWD": str(home / "work")}
    variables["NO_PROXY"] = "127.0.0.1"
    if client.script:
        runner = "node" if client.script.endswith(".mjs") else "python"
        script = PLACE / "node" / client.script if runner == "node" else HERE / "scripts" / client.script
        return [runner, str(script), url, prompt, str(stop_after), *client.more], variables
    agent = AGENTS[name]

    def told(text: str) -> str:
        return string.Template(text).substitute(URL=url, PROMPT=prompt, HOME=home)

    for path, text in agent.files.items():
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(told(text))
    return [told(word) for word in agent.words], variables | {key: told(one) for key, one in agent.variables.items()}


async def do(name: str, task: str, url: str, home: Path) -> Run:
    """Let the client do the task."""
    is_agent = not CLIENTS[name].script
    writes = is_agent and name != "llm"
    prompt = WRITE if task == "tool" and writes else PROMPTS[task]

    def amid() -> None:
        if task == "death":
            kill_worker(url)

    before = disconnects(url)
    async with Recorder(url, SIGN, amid) as recorder:
        stop_after = LEFT_AFTER if task == "left" else 0
        words, variables = command(name, prompt, stop_after, recorder.url, home)
        (home / "work").mkdir()
        process = await asyncio.create_subprocess_exec(
            *words, env=variables, cwd=home / "work", start_new_session=True,
            stdin=subprocess.DEVNULL if is_agent else subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        output, wrong = "", ""
        try:
            async with asyncio.timeout(PATIENCE_S):
                if task == "left":
                    while disconnects(url) == before or not is_at_rest(url):
                        await asyncio.sleep(0.5)
                        if is_agent and recorder.has_seen and process.returncode is None:
                            os.killpg(process.pid, signal.SIGINT)  # some want it twice
                output = (await process.communicate(None if is_agent else b""))[0].decode(errors="replace")
        except TimeoutError:
            wrong = "no end"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if wrong:
            output = (await process.communicate(None if is_agent else b""))[0].decode(errors="replace")
    wrong = wrong or judge(task, output, home / "work", is_agent, writes, process.returncode, recorder)
    return Run(wrong, output, recorder)


def judge(
    task: str, output: str, work: Path, is_agent: bool, writes: bool, code: int | None, recorder: Recorder
) -> str:
    """Say what is wrong with what the client has done; empty if nothing is."""
    said = " ".join(output.split())
    if code != 0 and not (task == "left" and is_agent):
        return f"exit code {code}"
    if task == "death":
        if not recorder.has_seen:
            return "nothing was killed"
        return "" if NUMBERS.strip() in said else "the text is not whole"
    if task == "tool" and writes:
        written = (work / FILE).read_text().strip() if (work / FILE).exists() else None
        return "" if written == WRITTEN else f"{FILE} holds {written}"
    if task == "tool":
        return "" if "get_weather(Rome, 21)" in said else "the tool was not called"
    return ""


def get(url: str, path: str) -> str:
    """Return the text at a path of the daemon."""
    with urllib.request.urlopen(url + path, timeout=PATIENCE_S) as answer:
        return str(answer.read().decode())


def disconnects(url: str) -> int:
    """Return how many clients have left before the end of their answers."""
    found = re.search(r"^melld_http_disconnects_total (\S+)", get(url, "/metrics"), re.MULTILINE)
    return int(float(found[1])) if found else 0


def is_at_rest(url: str) -> bool:
    """Return True if no request runs."""
    return not any(worker["running_requests"] for worker in json.loads(get(url, "/status"))["workers"])


def kill_worker(url: str) -> None:
    """Kill each worker that runs a request."""
    for worker in json.loads(get(url, "/status"))["workers"]:
        if worker["running_requests"]:
            os.kill(worker["pid"], signal.SIGKILL)


def record(run: Run, path: Path) -> None:
    """Write what the client asked, a line for each request, and what it printed."""
    lines = [json.dumps(one._asdict() | {"body": _readable(one.body)}) + "\n" for one in run.recorder.asked]
    path.with_suffix(".jsonl").write_text("".join(lines))
    path.with_suffix(".out").write_text(f"{run.wrong}\n{run.recorder.statuses}\n{run.output}")


def _readable(body: bytes) -> Any:
    with contextlib.suppress(ValueError):
        return json.loads(body)
    return base64.b64encode(body).decode()


@contextlib.contextmanager
def daemon(given: str | None) -> Iterator[str]:
    """Yield the URL of a daemon with two workers and the model that recites; `given`: of one that runs."""
    if given:
        yield given
        return
    with tempfile.TemporaryDirectory() as directory:
        make_reciting_model(Path(directory) / "model")
        flags = ("--set", 'scheduler.policy="most-free"', "--set", "idle.sleep_after_s=inf")
        flags += ("--set", "health.steady_after_s=0", "--device", "cpu:2")
        with DaemonProcess(Path(directory) / "model", *flags, genuine=True) as process:
            yield process.wait_ready().url


async def main() -> int:
    """Run the clients that were named; return how many tasks failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=", ".join(CLIENTS))
    parser.add_argument("--task", action="append", choices=PROMPTS, help="only this one")
    parser.add_argument("--record", type=Path, metavar="DIRECTORY", help="write what each client sent and printed")
    parser.add_argument("--url", help="a daemon that serves the model that recites")
    arguments = parser.parse_args()
    failed = 0
    with daemon(arguments.url) as url:
        for name in arguments.clients or CLIENTS:
            cells = []
            for task in arguments.task or PROMPTS:
                with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
                    run = await do(name, task, url, Path(home))
                failed += bool(run.wrong)
                cells.append(run.wrong.upper() or "ok")
                if arguments.record:
                    arguments.record.mkdir(parents=True, exist_ok=True)
                    record(run, arguments.record / f"{name}-{task}".replace(" ", "-"))
                elif run.wrong:
                    print(run.output[-3000:])
            print(f"| {name} | {version(CLIENTS[name])} |", " | ".join(cells), "|", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(min(asyncio.run(main()), 1))
