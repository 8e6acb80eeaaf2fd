"""The judge process: compiles a client's output constraint before any worker sees it.

Owns nothing that lasts, so that it can be killed at any moment: by the kernel when a constraint takes too much CPU time
or memory or overflows the compiler's stack, by the daemon when the client left.  It validates and compiles with the
workers' configuration, tokenizer and compilers; what passes here compiles there in about the same time.  The compiled
grammar is not passed on: serialised, it is up to a hundred times larger, and slower to read than to compile.
"""

import json
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
from setproctitle import setproctitle

from melld.engine.frontend.schema import Budget, check_schema
from melld.engine.wire.frames import READ_BYTES, FrameDecoder
from melld.engine.wire.judge import MEMORY_BYTES, JudgeConstraint, JudgeReady, Verdict
from melld.engine.wire.spec import WorkerSpec
from melld.engine.worker.grammars import GrammarBackends
from melld.engine.worker.writer import write_frame
from melld.errors import MelldError
from melld.nested import containers

if TYPE_CHECKING:
    from vllm.sampling_params import StructuredOutputsParams

SCHEMAS = ("schema", "json_schema")
"""What a structural tag calls the schemas in it."""
LONGEST_TIMER_S = 1e6
"""Stands for longer times, which the kernel's timer does not take."""


def main(spec: WorkerSpec, connection: socket.socket) -> None:
    """Run a judge, forked from the template as a worker is (`worker.main`)."""
    setproctitle("melld: judge")
    os.environ["VLLM_XGRAMMAR_CACHE_MB"] = "1"  # almost no cache: a verdict shows what a worker will need
    judge = Judge(spec)
    _limit_memory()
    write_frame(connection, JudgeReady())
    frames = FrameDecoder(JudgeConstraint)
    while data := connection.recv(READ_BYTES):
        for asked, payload in frames.feed(data):
            write_frame(connection, *judge.judge(asked, payload[0]))
    os._exit(0)


class Judge:
    """A judge of one constraint after the other."""

    def __init__(self, spec: WorkerSpec) -> None:
        from vllm.tokenizers import cached_tokenizer_from_config

        from melld.engine.arguments import async_engine_args, engine_config

        self._config = engine_config(async_engine_args(spec.model_path, spec.engine_arguments))
        self._tokenizer = cached_tokenizer_from_config(model_config=self._config.model_config)
        self._backends = GrammarBackends(self._config, self._tokenizer)
        if self._config.structured_outputs_config.backend in ("auto", "xgrammar"):
            self._backends.get("xgrammar")

    def judge(self, asked: JudgeConstraint, constraint: bytes) -> tuple[Verdict, list[bytes]]:
        """Return the verdict, and the constraint as a worker must compile it."""
        from vllm.sampling_params import StructuredOutputsParams

        began_s = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, min(asked.cpu_s, LONGEST_TIMER_S))  # its signal, SIGPROF, ends the process
        try:
            params = msgspec.msgpack.decode(constraint, type=StructuredOutputsParams)
            for schema in _schemas(params):
                check_schema(schema, "", Budget())
            self._validate(params)
            left_s, _ = signal.setitimer(signal.ITIMER_PROF, 0)
            backend = self._backends.get(params._backend or "")  # noqa: SLF001  vLLM's own way to name it
            signal.setitimer(signal.ITIMER_PROF, left_s)
            self._compile(backend, params)
        except MemoryError:
            os._exit(1)  # the compiler's state is undefined now
        except MelldError as error:
            return Verdict(refusal=str(error), code=error.code), []
        except Exception as error:  # noqa: BLE001  the client gets whatever the compiler says of its text
            return Verdict(refusal=_one_line(error), code="invalid_grammar"), []
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        return Verdict(cpu_s=time.process_time() - began_s), [msgspec.msgpack.encode(params)]

    def _validate(self, params: "StructuredOutputsParams") -> None:
        """Validate as vLLM does, which chooses the compiler (`params._backend`) and rewrites the constraint for it."""
        from vllm.sampling_params import SamplingParams

        wanted = SamplingParams(structured_outputs=params)
        config = self._config
        wanted._validate_structured_outputs(config.model_config, config.structured_outputs_config, self._tokenizer)  # noqa: SLF001

    def _compile(self, backend: Any, params: "StructuredOutputsParams") -> None:
        """Compile, and find the allowed first tokens: some compilers do all their work there."""
        from vllm.v1.structured_output.request import get_structured_output_key

        grammar = backend.compile_grammar(*get_structured_output_key(params))
        mask = backend.allocate_token_bitmask(1)
        grammar.fill_bitmask(mask, 0)
        if not mask.any():
            raise ValueError("no text satisfies it")


def _schemas(params: "StructuredOutputsParams") -> Iterator[object]:
    """Yield every JSON schema of the constraint, parsed."""
    if params.json is not None:
        yield _parsed(params.json)
    for part in containers(_parsed(params.structural_tag), besides=SCHEMAS):
        if isinstance(part, dict):
            yield from (part[name] for name in SCHEMAS if name in part)


def _parsed(text: object) -> Any:
    return json.loads(text) if isinstance(text, str) else text


def _one_line(error: Exception) -> str:
    """Return the reason without its leading place in the compiler's source."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (" ".join(lines) or type(error).__name__)[:1000]


def _limit_memory() -> None:
    most = psutil.Process().memory_info().data + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
