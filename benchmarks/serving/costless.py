"""`melld` with workers that compute nothing: a token for each request at each step, on the wire of any worker.

    python -m benchmarks.serving.costless [--whole] serve ...

What such a daemon delivers is what its event loop can.  Requests move by tokens.  `--whole`: vLLM's serving classes
make every event of every stream.  Steps take COSTLESS_STEP_S seconds.
"""

import os
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
from melld.ids import RequestId
from melld.kvstore.geometry import KvGeometry
from melld.migrate import messages as say
from melld.migrate.snapshot import Phase, RequestFacts, Via

STEP_S = float(os.environ.get("COSTLESS_STEP_S", "0.005"))
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


class Running(msgspec.Struct):
    """A request on the worker."""

    lease: int
    prompt_tokens: int
    made: int
    most: int
    blocks: int = 0


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
        self._frozen: dict[str, Running] = {}
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
                    self._leave(request)
            case say.MoveMessage():
                self._move(message, payload)

    def _leave(self, request: str) -> None:
        if (self._running.pop(request, None) or self._frozen.pop(request, None)) is not None:
            self._gone.append(request)

    def _move(self, told: Any, payload: list[bytes]) -> None:
        """Answer a command of a move by tokens."""
        names = {"move": told.move, "number": told.number, "request": told.request, "cause": told.cause}
        one = self._running.get(told.request)
        match told:
            case say.DescribeRequest() if one is not None:
                tokens = one.prompt_tokens + one.made
                facts = RequestFacts(tokens, one.prompt_tokens, tokens - 1, ((),), 0)
                self._say(say.RequestDescribed(**names, facts=facts, refusals={Via.KV: "there is none"}, step_s=STEP_S))
            case say.WarmRequest():
                self._say(say.RoomReserved(**names))
            case say.FreezeRequest() if one is not None:
                self._frozen[told.request] = self._running.pop(told.request)
                self._say(say.RequestFrozen(**names), [msgspec.msgpack.encode(one)])
            case say.AttachRequest():
                arrived = msgspec.msgpack.decode(payload[0], type=Running)
                self._running[told.request] = msgspec.structs.replace(arrived, lease=told.lease, blocks=0)
                self._say(say.RequestAttached(**names, blocks=0, nbytes=0, copy_s=0.0))
            case say.ReleaseRequest():
                self._leave(told.request)
                self._say(say.RequestReleased(**names))
            case say.ThawRequest():
                if (frozen := self._frozen.pop(told.request, None)) is not None:
                    self._running[told.request] = frozen
                self._say(say.RequestThawed(**names))
            case say.CancelReservation():
                if one is not None and one.lease == told.lease:
                    self._leave(told.request)
                self._say(say.ReservationCancelled(**names))
            case _:
                self._say(say.CommandFailed(**names, reason="the request is not here"))

    def _add(self, message: Any, payload: list[bytes], made: int) -> None:
        request = self._requests.decode(payload[:1])
        tokens = len(request.prompt_token_ids)
        self._running[message.request] = Running(message.lease, tokens, made, request.sampling_params.max_tokens)

    def _step(self) -> None:
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

        tokens, outputs, changed, leases = {}, [], {}, {}
        for name, one in list(self._running.items()):
            token = TOKENS[one.made % len(TOKENS)]
            one.made += 1
            is_end = one.made >= one.most
            if is_end:
                outputs.append(EngineCoreOutput(name, [token], finish_reason=FinishReason.LENGTH))
            else:
                tokens[RequestId(name)] = [token]
            if one.lease:
                leases[name] = one.lease
            if is_end:
                del self._running[name]
                self._gone.append(name)
            elif (blocks := -(-(one.prompt_tokens + one.made) // BLOCK_TOKENS)) != one.blocks:
                one.blocks = blocks
                changed[name] = blocks, Phase.DECODING
        used = sum(one.blocks for one in self._running.values())
        self._reports += 1
        report = wire.BlockReport(used, BLOCKS, 0, changed)
        gone, self._gone = self._gone, []
        done = wire.StepDone(
            self._reports,
            STEP_S,
            report,
            leases,
            gone,
            decodes=len(tokens) + len(outputs),
            timestamp_s=time.monotonic(),
            tokens=tokens,
        )
        self._say(done, self._encode(EngineCoreOutputs(outputs=outputs)) if outputs else ())

    def _say(self, message: msgspec.Struct, payload: Any = ()) -> None:
        self._connection.sendall(b"".join(encode_frame(message, payload)))


def begin(words: list[str]) -> int:
    """Run `melld` with these words."""
    template.PRELOAD += ["benchmarks.serving.costless_workers"]
    if words[0] != "--whole":
        return cli.main(words)
    from benchmarks.serving.whole_events import leave_all_to_vllm

    leave_all_to_vllm()
    return cli.main(words[1:])


if __name__ == "__main__":
    sys.exit(begin(sys.argv[1:]))
