"""Models that keep no KV, such as BERT: placed by load, computed whole, and not lost with a worker."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from melld.demo_model import VOCABULARY, make_demo_model
from tests.api.http_client import CHAT, COMPLETIONS, request
from tests.migrate.live import PATIENCE_S, Operator
from tests.serve.daemon_process import DaemonProcess

EMBEDDINGS = "/v1/embeddings"
RANDOM = np.random.default_rng(5)
TEXTS = [[int(token) for token in RANDOM.integers(5, 2000, 20 + 3 * number)] for number in range(48)]
"""As tokens: no tokenizer comes between them and the model."""


@pytest.fixture(scope="module")
def daemon(model_of: Callable[[str], Path]) -> Iterator[DaemonProcess]:
    """An embedder on two workers, both always in use: the one with less to compute gets the next text."""
    spread = ("--set", 'scheduler.policy="most-free"', "--set", "idle.sleep_after_s=inf")
    spread += ("--set", "health.steady_after_s=0", "--set", 'model.vllm.runner="pooling"')
    with DaemonProcess(model_of("bert"), "--device", "cpu:2", *spread) as process:
        yield process.wait_ready()


@pytest.fixture
def operator(daemon: DaemonProcess) -> Operator:
    return Operator(daemon)


def ask(daemon: DaemonProcess, path: str, model: str, texts: list[list[int]]) -> list[Any]:
    answered = request(daemon.url, "POST", path, {"model": model, "input": texts})
    assert answered.status == 200, answered.body
    return list(answered.json()["data"])


def embed(daemon: DaemonProcess, texts: list[list[int]]) -> Any:
    return np.array([one["embedding"] for one in ask(daemon, EMBEDDINGS, "demo", texts)])


class Call(threading.Thread):
    """A call under way."""

    def __init__(self, daemon: DaemonProcess, texts: list[list[int]]) -> None:
        super().__init__(daemon=True)
        self._asked = daemon, texts
        self.vectors: Any = None
        self.start()

    def run(self) -> None:
        self.vectors = embed(*self._asked)


def test_vectors_equal_those_of_transformers(daemon: DaemonProcess, model_of: Callable[[str], Path]) -> None:
    """The first token's last hidden state, of unit length; and no two texts are alike."""
    import torch
    from transformers import BertModel

    model = BertModel.from_pretrained(model_of("bert")).eval()
    with torch.no_grad():
        states = [model(torch.tensor([text])).last_hidden_state[0, 0].numpy() for text in TEXTS[:8]]
    expected = np.array([state / np.linalg.norm(state) for state in states])
    vectors = embed(daemon, TEXTS[:8])
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    assert np.max(vectors @ vectors.T - np.eye(len(vectors))) < 0.999


def test_texts_go_to_the_worker_with_least_to_compute(daemon: DaemonProcess, operator: Operator) -> None:
    """A long text counts for as much as many short ones, and the status claims no memory for any."""
    pids = [worker["pid"] for worker in operator.status()["workers"]]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        calls = [Call(daemon, [[7] * 400])]
        operator.wait(lambda status: len(status["requests"]) == 1, PATIENCE_S)
        calls.append(Call(daemon, [[9] * 40 for _ in range(8)]))
        operator.wait(lambda status: len(status["requests"]) == 9, PATIENCE_S)
        status = operator.status()
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    workers = [one["worker"] for one in status["requests"]]
    assert len(set(workers[1:])) == 1
    assert workers[0] != workers[1]
    assert {one["kv_bytes"] for one in status["requests"]} == {0}
    for call in calls:
        call.join(PATIENCE_S)
        assert call.vectors is not None


def test_every_text_of_a_call_outlives_a_worker(daemon: DaemonProcess, operator: Operator) -> None:
    """kill -9 in mid-call: the other worker computes the rest, with the same result."""
    alone = np.concatenate([embed(daemon, [text]) for text in TEXTS])
    victim, other = operator.status()["workers"]
    for worker in (victim, other):
        os.kill(worker["pid"], signal.SIGSTOP)  # so that it surely has some of them when it dies
    call = Call(daemon, TEXTS)
    operator.wait(lambda status: len(status["requests"]) == len(TEXTS), PATIENCE_S)
    assert {one["worker"] for one in operator.status()["requests"]} == {victim["worker"], other["worker"]}
    os.kill(victim["pid"], signal.SIGKILL)
    os.kill(other["pid"], signal.SIGCONT)
    call.join(PATIENCE_S)
    np.testing.assert_allclose(call.vectors, alone, atol=1e-5)
    operator.wait(lambda status: all(one["state"] == "ready" for one in status["workers"]), PATIENCE_S)


def test_the_status_says_that_there_is_no_kv(daemon: DaemonProcess) -> None:
    """Which is not a KV cache of no bytes."""
    assert [worker["capacity_bytes"] for worker in daemon.status()["workers"]] == [None, None]
    shown = daemon.melld("status").stdout
    assert sum("no KV" in line for line in shown.splitlines() if line.startswith("w")) == 2
    assert "tokens only" not in shown, "no request of it moves, in no way"
    assert "melld_worker_kv_capacity_bytes{" not in daemon.get("/metrics")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses", "/v1/messages", "/classify"])
def test_an_unsupported_call_names_the_supported_paths(daemon: DaemonProcess, path: str) -> None:
    """People confuse an embedder with a chat model: one line says which paths it answers."""
    asked = {"model": "demo", "prompt": "x", "input": "x", "max_tokens": 5}
    asked["messages"] = [{"role": "user", "content": "x"}]  # type: ignore[assignment]
    answered = request(daemon.url, "POST", path, asked)
    assert answered.status == 400, answered.body
    said = json.loads(answered.body)["error"]["message"]
    assert "does not support" in said
    assert EMBEDDINGS in said
    assert "\n" not in said


EMBED = ("bert", "bge_m3", "nomic", "modernbert")
CLASSIFY = ("bert_reranker", "bge_reranker", "modernbert_reranker", "bert_tagger")


@pytest.fixture(scope="module")
def several(model_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """All families, on one device."""
    config = tmp_path_factory.mktemp("encoders") / "melld.toml"
    models = [
        f'{{path = "{model_of(name)}", name = "{name}", vllm = {{runner = "pooling"}}}}' for name in EMBED + CLASSIFY
    ]
    config.write_text(f'models = [{", ".join(models)}]\n[devices]\ncpu = {{count = 1, memory_bytes = "4GiB"}}\n')
    with DaemonProcess(None, "--config", str(config)) as process:
        yield process.wait_ready()


def reference(model_of: Callable[[str], Path], name: str, text: list[int]) -> Any:
    """Return what transformers compute of it."""
    import torch
    import transformers

    directory = model_of(name)
    (kind,) = json.loads((directory / "config.json").read_text())["architectures"]
    model = getattr(transformers, kind).from_pretrained(directory).eval()
    with torch.no_grad():
        return model(torch.tensor([text]))


@pytest.mark.long
@pytest.mark.parametrize("name", EMBED)
def test_every_family_embeds_as_transformers_do(
    several: DaemonProcess, model_of: Callable[[str], Path], name: str
) -> None:
    """By the first token, or by the mean of all, depending on the family."""
    states = reference(model_of, name, TEXTS[3]).last_hidden_state[0].numpy()
    (found,) = ask(several, EMBEDDINGS, name, [TEXTS[3]])
    by_family = [pooled / np.linalg.norm(pooled) for pooled in (states[0], states.mean(0))]
    assert any(np.allclose(found["embedding"], pooled, atol=1e-5) for pooled in by_family)
    assert not np.allclose(*by_family, atol=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("name", CLASSIFY)
def test_every_family_classifies_as_transformers_do(
    several: DaemonProcess, model_of: Callable[[str], Path], name: str
) -> None:
    """A reranker's one class is its score; a tagger classifies each token."""
    logits = reference(model_of, name, TEXTS[3]).logits[0].numpy()
    if name == "bert_tagger":
        (found,) = ask(several, "/pooling", name, [TEXTS[3]])
        scores, expected = np.array(found["data"]), np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    else:
        (found,) = ask(several, "/classify", name, [TEXTS[3]])
        scores, expected = np.array(found["probs"]), 1 / (1 + np.exp(-logits))
    np.testing.assert_allclose(scores, expected, atol=1e-5)


@pytest.mark.long
def test_a_vision_encoder_is_served(tmp_path: Path) -> None:
    """A SigLIP keeps no KV either; here it reads text."""
    make_demo_model(tmp_path)
    sides = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {"architectures": ["SiglipModel"], "model_type": "siglip", "vision_config": sides | {"image_size": 56}}
    config["text_config"] = sides | {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "SiglipImageProcessor"}')
    (tmp_path / "processor_config.json").write_text('{"processor_class": "SiglipProcessor"}')
    with DaemonProcess(tmp_path, "--device", "cpu:1", "--load-format", "dummy") as process:
        (vector,) = embed(process.wait_ready(), [[7, 8, 9]])
        assert len(vector) == 64
        assert [worker["capacity_bytes"] for worker in process.status()["workers"]] == [None]
