"""`melld` with workers that compute nothing: each of their requests has a token every 5 ms, on the wire of any worker.

    PYTHONPATH=. .venv/bin/python -m benchmarks.costless [--whole] serve ...

What such a daemon delivers is what its event loop can.  A request moves only when its worker dies.  `--whole`: vLLM's
serving classes make every event of every stream.
"""

import select
import socket
import sys
import time
from typing import Any

import msgspec

from melld import cli
from melld.engine.host import template
from melld.engine.wire import messages as wire
from melld.engine.wire.frames import READ_BYTES, FrameDecoder, encode_frame
from melld.engine.wire.spec import WorkerSpec
from melld.kvstore.geometry import KvGeometry
from melld.migrate.snapshot import Phase

STEP_S = 0.005
BLOCKS, BLOCK_TOKENS, BLOCK_BYTES = 1 << 16, 32, 1 << 17
SLOTS, CONTEXT_TOKENS = 1024, 32768
TOKENS = range(300, 1300)
"""Those that it says, one after the other."""


def main(_spec: WorkerSpec, connection: socket.socket) -> None:
    """Run a worker."""
    from vllm.v1.engine import EngineCoreReadyResponse

    said = dict.fromkeys(EngineCoreReadyResponse.__dataclass_fields__, 1)
    said |= {
        "max_model_len": CONTEXT_TOKENS,
        "num_gpu_blocks": BLOCKS,
        "block_size": BLOCK_TOKENS,
        "max_num_seqs": SLOTS,
    }
    said |= {
        "dtype": "float32",
        "vllm_version": "",
        "instance_id": "",
        "supports_lora": False,
        "dp_stats_address": None,
    }
    said |= dict.fromkeys(("kv_events_config", "weight_transfer_backend", "mamba_block_size"))
    said |= {"enable_sleep_mode": False, "supports_draft_weight_updates": False}
    ready = wire.WorkerReady(
        total_blocks=BLOCKS,
        geometry=KvGeometry(BLOCK_TOKENS, BLOCK_BYTES),
        max_requests=SLOTS,
        supported_tasks=["generate"],
        load_s=0.0,
        ready_response=msgspec.msgpack.encode(said),
    )
    connection.sendall(b"".join(encode_frame(ready)))
    Costless(connection).serve()


class Running:
    """A request on the worker."""

    def __init__(self, lease: int, prompt_tokens: int, made: int, most: int) -> None:
        self.lease, self.prompt_tokens, self.made, self.most = lease, prompt_tokens, made, most
        self.blocks = 0


class Costless:
    """A worker's loop: read what has come, then a token for each request, at each step."""

    def __init__(self, connection: socket.socket) -> None:
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        self._connection = connection
        self._frames = FrameDecoder(wire.ToWorker)
        self._requests = MsgpackDecoder(EngineCoreRequest)
        self._encode = MsgpackEncoder(size_threshold=sys.maxsize).encode
        self._running: dict[str, Running] = {}
        self._gone: list[str] = []
        self._reports = 0

    def serve(self) -> None:
        """Serve until told to stop."""
        due_s = time.monotonic()
        while True:
            wait_s = max(due_s - time.monotonic(), 0.0) if self._running or self._gone else None
            if select.select([self._connection], [], [], wait_s)[0]:
                data = self._connection.recv(READ_BYTES)
                for message, payload in self._frames.feed(data):
                    self._obey(message, payload)
                if not data:
                    return
            now_s = time.monotonic()
            if now_s >= due_s and (self._running or self._gone):
                due_s = now_s + STEP_S
                self._step()

    def _obey(self, message: Any, payload: list[bytes]) -> None:
        match message:
            case wire.Ping():
                self._say(wire.Pong(busy_s=0.0))
            case wire.StopWorker():
                sys.exit()
            case wire.AddRequest():
                self._add(message, payload, 0)
            case wire.ResumeRequest():
                self._say(wire.RequestTaken(request=message.request, lease=message.lease))
                self._add(message, payload, len(msgspec.msgpack.decode(payload[1])))
            case wire.AbortRequests():
                for request in message.requests:
                    if self._running.pop(request, None) is not None:
                        self._gone.append(request)

    def _add(self, message: Any, payload: list[bytes], made: int) -> None:
        request = self._requests.decode(payload[:1])
        tokens = len(request.prompt_token_ids)
        self._running[message.request] = Running(message.lease, tokens, made, request.sampling_params.max_tokens)

    def _step(self) -> None:
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

        outputs, changed, leases = [], {}, {}
        for name, one in list(self._running.items()):
            token = TOKENS[one.made % len(TOKENS)]
            one.made += 1
            end = FinishReason.LENGTH if one.made >= one.most else None
            outputs.append(EngineCoreOutput(request_id=name, new_token_ids=[token], finish_reason=end))
            if one.lease:
                leases[name] = one.lease
            if end is not None:
                del self._running[name]
                self._gone.append(name)
            elif (blocks := -(-(one.prompt_tokens + one.made) // BLOCK_TOKENS)) != one.blocks:
                one.blocks = blocks
                changed[name] = blocks, Phase.DECODING
        used = sum(one.blocks for one in self._running.values())
        self._reports += 1
        report = wire.BlockReport(used, BLOCKS, 0, changed)
        gone, self._gone = self._gone, []
        done = wire.StepDone(self._reports, STEP_S, report, leases, gone, decodes=len(outputs))
        self._say(done, self._encode(EngineCoreOutputs(outputs=outputs)) if outputs else ())

    def _say(self, message: msgspec.Struct, payload: Any = ()) -> None:
        self._connection.sendall(b"".join(encode_frame(message, payload)))


def begin(words: list[str]) -> int:
    """Run `melld` with these words."""
    template.PRELOAD += ["benchmarks.costless_workers"]
    if words[0] != "--whole":
        return cli.main(words)
    from melld.api import app

    app.outlet_of = lambda *_: None
    return cli.main(words[1:])


if __name__ == "__main__":
    sys.exit(begin(sys.argv[1:]))
