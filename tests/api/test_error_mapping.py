"""Which errors are logged in full: a client that gets only a 500 has nothing to tell the operator."""

import json

from tests.forked import run_python

# vLLM takes seconds to import, and warns: a process of its own answers for all errors.
SCRIPT = """
import asyncio, json, os, socket
from http import HTTPStatus
os.environ["VLLM_MEDIA_FETCH_MAX_RETRIES"] = "1"
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.multimodal.media.connector import MediaConnector
from vllm.multimodal.media.image import ImageMediaIO
from vllm.v1.engine.exceptions import EngineGenerateError
from melld.api.answers import Refusal
from melld.api.error_mapping import ServingFault, answer_to, needs_traceback
from melld.errors import NoJudge

def raised_from(cause):
    error = EngineGenerateError()
    error.__cause__ = cause
    return error

async def fetch(urls):
    fetches = [MediaConnector().load_from_url_async(url, ImageMediaIO(), fetch_timeout=0.2) for url in urls]
    return await asyncio.gather(*fetches, return_exceptions=True)

with socket.socket() as silent, socket.socket() as closed:
    silent.bind(("127.0.0.1", 0)), silent.listen(), closed.bind(("127.0.0.1", 0))
    urls = [f"http://127.0.0.1:{one.getsockname()[1]}/x.png" for one in (silent, closed)]
    hangs, refuses = asyncio.run(fetch(urls))

errors = {
    "a bug": RuntimeError("a bug"),
    "a bug in a generator": raised_from(KeyError("a bug")),
    "a bug that was wrapped": ServingFault(RuntimeError("a bug")),
    "a bug that was reported": ServingFault(create_error_response("a bug", "InternalServerError", HTTPStatus(500))),
    "a client's mistake": ServingFault(ValueError("no such field")),
    "a refusal": Refusal(400, "no such field"),
    "told in words": raised_from(NoJudge()),
    "a server of images that hangs": hangs,
    "a server of images that is down": ServingFault(refuses),
}
answers = {name: answer_to(error) for name, error in errors.items()}
print(json.dumps({name: [answers[name].status, needs_traceback(errors[name], answers[name])] for name in errors}))
"""


def test_every_500_is_logged_in_full() -> None:
    """Whether vLLM raised or reported it; client errors and explained errors do not fill the log."""
    done = run_python("-c", SCRIPT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "a bug": [500, True],
        "a bug in a generator": [500, True],
        "a bug that was wrapped": [500, True],
        "a bug that was reported": [500, True],
        "a client's mistake": [400, False],
        "a refusal": [400, False],
        "told in words": [503, False],
        "a server of images that hangs": [502, False],
        "a server of images that is down": [502, False],
    }
