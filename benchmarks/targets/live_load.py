"""A workload played against a daemon's API in real time, open loop: arrivals do not wait for answers.

Owns the client's clock.  Prompts are token ids drawn at random, so that no two share a prefix.
"""

import asyncio
import json
import random
import statistics
import time
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from melld.simulator.workload import Workload

PATIENCE_S = 300.0


class Played(msgspec.Struct):
    """What a client saw of one request.  `arrivals_s`: of each chunk, on the monotonic clock; most hold one token."""

    asked_s: float
    prompt_tokens: int
    wanted_tokens: int
    tokens: int = 0
    arrivals_s: list[float] = []
    error: str = ""

    @property
    def whole(self) -> bool:
        """Return True if all its tokens came."""
        return not self.error and self.tokens == self.wanted_tokens

    @property
    def ttft_s(self) -> float:
        """Return the time from the question to the first chunk."""
        return self.arrivals_s[0] - self.asked_s

    @property
    def gaps_s(self) -> list[float]:
        """Return the times between chunks."""
        return [after - before for before, after in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)]


async def play(url: str, workload: Workload, seed: int) -> list[Played]:
    """Ask everything at its time; returns when all have ended."""
    chance = random.Random(seed)
    prompts = [[chance.randrange(10, 250) for _ in range(tokens)] for tokens in workload.prompt_tokens]
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    connector = aiohttp.TCPConnector(limit=0)
    began_s = time.monotonic()
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
        tasks = []
        more = [{"priority": one} for one in workload.priority] or [{}] * len(prompts)
        for at_s, prompt, tokens, own in zip(workload.arrival_s, prompts, workload.output_tokens, more, strict=True):
            await asyncio.sleep(max(0.0, began_s + at_s - time.monotonic()))
            tasks.append(asyncio.create_task(_ask(session, prompt, tokens, own)))
        return list(await asyncio.gather(*tasks))


async def _ask(session: aiohttp.ClientSession, prompt: list[int], tokens: int, more: Mapping[str, int]) -> Played:
    body: dict[str, Any] = {
        **more,
        "model": "demo",
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    played = Played(time.monotonic(), len(prompt), tokens)
    try:
        async with session.post("/v1/completions", json=body) as answer:
            if answer.status != 200:
                played.error = f"{answer.status}: {(await answer.text())[:200]}"
                return played
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    _take(played, line)
    except (aiohttp.ClientError, TimeoutError) as error:
        played.error = repr(error)
    return played


def _take(played: Played, line: bytes) -> None:
    chunk = json.loads(line[6:])
    if "error" in chunk:
        played.error = str(chunk["error"])
    elif chunk["choices"]:
        played.arrivals_s.append(time.monotonic())
    else:
        played.tokens = chunk["usage"]["completion_tokens"]


def spread_ms(values_s: list[float]) -> tuple[float, float]:
    """Median and 99th percentile, in milliseconds."""
    if len(values_s) < 2:
        return (values_s or [0.0])[0] * 1e3, (values_s or [0.0])[0] * 1e3
    return statistics.median(values_s) * 1e3, statistics.quantiles(values_s, n=100)[98] * 1e3
