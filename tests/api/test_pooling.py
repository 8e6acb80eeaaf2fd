"""Embedding and scoring models: what clients of their routes rely on."""

import base64
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from tests.api.http_client import connect, post, request
from tests.api.test_streams import metric, until
from tests.serve.daemon_process import DaemonProcess
from tests.tiny_models import make_reranker

DOCUMENTS = ["a block table", "another text", "what is a block table?"]
QUERY = "a block table"
PAIR = {"model": "embedder", "queries": "x", "documents": "y"}


@pytest.fixture(scope="module")
def daemon(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """The demo model twice: its last hidden state is the answer, or a score computed from it."""
    directory = tmp_path_factory.mktemp("pooling")
    make_reranker(directory / "reranker")
    config = directory / "melld.toml"
    config.write_text(f"""
        models = [
            {{path = "{demo_model}", name = "embedder", vllm = {{runner = "pooling"}}}},
            {{path = "{directory}/reranker", name = ["reranker", "rerank-v3.5"]}},
        ]
        [devices]
        cpu = {{count = 1, kv_bytes = "64MiB"}}
        [server]
        max_queued_requests = 300
    """)
    with DaemonProcess(None, "--config", str(config)) as process:
        yield process.wait_ready()


MANY = 1000
"""In one call: more than this daemon's queue takes while its worker computes."""


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=daemon.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(daemon: DaemonProcess, path: str, **fields: Any) -> Any:
    answered = request(daemon.url, "POST", path, fields)
    assert answered.status == 200, answered.body
    return answered.json()


def test_texts_can_yield_to_chats(daemon: DaemonProcess) -> None:
    """Bulk embedding can ask for low priority without changing the vectors."""
    usual = ask(daemon, "/v1/embeddings", model="embedder", input=QUERY)["data"]
    for fields in ({"service_tier": "flex"}, {"service_tier": None}, {"priority": 100}):
        assert ask(daemon, "/v1/embeddings", model="embedder", input=QUERY, **fields)["data"] == usual
        ask(daemon, "/score", model="reranker", queries=QUERY, documents=DOCUMENTS, **fields)
    refused = request(daemon.url, "POST", "/score", PAIR | {"priority": 101})
    assert (refused.status, refused.json()["error"]["param"]) == (400, "priority")


def embeddings(daemon: DaemonProcess, texts: list[Any]) -> list[list[float]]:
    return [one["embedding"] for one in ask(daemon, "/v1/embeddings", model="embedder", input=texts)["data"]]


def scores(daemon: DaemonProcess, model: str, path: str = "/score") -> list[float]:
    answer = ask(daemon, path, model=model, queries=QUERY, documents=DOCUMENTS)
    return [one["score"] for one in answer["data"]]


def test_equal_texts_have_equal_embeddings_and_others_differ(client: openai.OpenAI) -> None:
    """The vectors are meaningful: unit length, in the order of the texts, and distinct."""
    answer = client.embeddings.create(model="embedder", input=["a block table", "another text", "a block table"])
    first, other, again = (entry.embedding for entry in answer.data)
    assert math.isclose(math.hypot(*first), 1.0, rel_tol=1e-3)
    assert math.isclose(sum(a * b for a, b in zip(first, again, strict=True)), 1.0, rel_tol=1e-3)
    assert sum(a * b for a, b in zip(first, other, strict=True)) < 0.9
    assert answer.usage.prompt_tokens > 0


def test_a_thousand_texts_fit_in_one_call(daemon: DaemonProcess) -> None:
    """Vector stores send as many at once as OpenAI accepts; each text gets its own vector."""
    texts = [f"text {number}" for number in range(MANY)]
    tokens = [ask(daemon, "/tokenize", model="embedder", prompt=texts[0])["tokens"]] * 300
    vectors = embeddings(daemon, texts)
    assert len(vectors) == MANY
    for number in (0, MANY // 2, MANY - 1):
        assert np.allclose(vectors[number], embeddings(daemon, [texts[number]])[0], atol=1e-5)
    assert np.allclose(embeddings(daemon, tokens)[-1], vectors[0], atol=1e-5)
    assert len(ask(daemon, "/rerank", model="reranker", query="x", documents=texts[:400])["results"]) == 400


def test_a_departed_client_s_texts_are_dropped(daemon: DaemonProcess) -> None:
    """Running ones are aborted, and the others never start."""
    with connect(daemon.url) as connection:
        connection.sendall(post({"model": "embedder", "input": ["a text " * 100] * 1000}, "/v1/embeddings"))
        until(lambda: bool(daemon.status()["requests"]))
    until(lambda: daemon.status()["requests"] == [] and metric(daemon, "melld_http_calls_in_flight") == 0)
    assert len(embeddings(daemon, ["x"])) == 1


@pytest.mark.parametrize("encoding", ["base64", "bytes"])
def test_embeddings_can_be_returned_as_bytes(daemon: DaemonProcess, encoding: str) -> None:
    """Many vectors are parsed faster; a header of the raw bytes says where each begins."""
    asked = {"model": "embedder", "input": DOCUMENTS, "encoding_format": encoding}
    answered = request(daemon.url, "POST", "/v1/embeddings", asked)
    assert answered.status == 200, answered.body
    if encoding == "base64":
        found = [base64.b64decode(one["embedding"]) for one in answered.json()["data"]]
    else:
        headers = {name.lower(): value for name, value in answered.headers.items()}
        assert headers["content-type"] == "application/octet-stream"
        found = [answered.body[one["start"] : one["end"]] for one in json.loads(headers["metadata"])["data"]]
    for raw, floats in zip(found, embeddings(daemon, DOCUMENTS), strict=True):
        assert np.allclose(np.frombuffer(raw, np.float32), floats, atol=1e-6)


def test_cohere_clients_get_the_same_vectors(daemon: DaemonProcess) -> None:
    """In their own format, several encodings at once."""
    asked = {"model": "embedder", "input_type": None, "texts": DOCUMENTS, "embedding_types": ["float", "base64"]}
    answer = ask(daemon, "/v2/embed", **asked)
    assert answer["embeddings"]["float"] == embeddings(daemon, DOCUMENTS)
    raw = [base64.b64decode(one) for one in answer["embeddings"]["base64"]]
    assert np.allclose([np.frombuffer(one, np.float32) for one in raw], answer["embeddings"]["float"], atol=1e-6)
    assert answer["meta"]["billed_units"]["input_tokens"] > 0


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_an_embedding_model_scores_by_cosine(daemon: DaemonProcess, path: str) -> None:
    """A score is the cosine of two embeddings: the same text scores one."""
    query, *documents = embeddings(daemon, [QUERY, *DOCUMENTS])
    expected = [sum(a * b for a, b in zip(query, one, strict=True)) for one in documents]
    assert np.allclose(scores(daemon, "embedder", path), expected, atol=1e-4)
    assert math.isclose(expected[0], 1.0, rel_tol=1e-3)


def test_long_documents_are_truncated_before_comparison(daemon: DaemonProcess) -> None:
    """What is cut off makes no difference."""
    cut = {"model": "embedder", "queries": QUERY, "max_tokens_per_doc": 4}
    texts = [QUERY, f"{QUERY} and much more of it"]
    one, other = ask(daemon, "/score", **cut, documents=texts)["data"]
    assert one["score"] == pytest.approx(other["score"])
    assert scores(daemon, "embedder")[0] == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
@pytest.mark.parametrize("model", ["embedder", "reranker", "rerank-v3.5"])
def test_documents_are_sorted_by_score(daemon: DaemonProcess, model: str, path: str) -> None:
    """Each result names its document by index and text; `top_n` cuts the list."""
    answer = ask(daemon, path, model=model, query=QUERY, documents=DOCUMENTS, top_n=2)
    by_score = sorted(enumerate(scores(daemon, model)), key=lambda pair: -pair[1])[:2]
    assert [one["index"] for one in answer["results"]] == [index for index, _ in by_score]
    assert np.allclose([one["relevance_score"] for one in answer["results"]], [score for _, score in by_score])
    assert all(one["document"]["text"] == DOCUMENTS[one["index"]] for one in answer["results"])
    assert answer["usage"]["total_tokens"] > 0


@pytest.mark.parametrize("model", ["embedder", "reranker"])
def test_documents_may_be_objects_and_are_returned_on_request(daemon: DaemonProcess, model: str) -> None:
    """Cohere's and Jina's clients send objects; without the documents an answer is a tenth as long."""
    asked = {"model": model, "query": QUERY, "top_n": None}
    plain = ask(daemon, "/rerank", **asked, documents=DOCUMENTS)["results"]
    objects = [{"text": text, "title": "another field"} for text in DOCUMENTS]
    assert ask(daemon, "/rerank", **asked, documents=objects, return_documents=None)["results"] == plain
    bare = ask(daemon, "/rerank", **asked, documents=objects, return_documents=False)["results"]
    assert bare == [{name: value for name, value in one.items() if name != "document"} for one in plain]


def test_null_means_the_default_where_it_is_unambiguous(daemon: DaemonProcess) -> None:
    """Clients of some languages send every field, with null where nothing is set."""
    nulls = dict.fromkeys(("encoding_format", "embed_dtype", "add_special_tokens", "dimensions", "user"))
    asked = {"model": "embedder", "input": QUERY}
    assert ask(daemon, "/v1/embeddings", **asked, **nulls)["data"] == ask(daemon, "/v1/embeddings", **asked)["data"]


def test_a_scoring_model_classifies_and_pools_consistently(daemon: DaemonProcess) -> None:
    """The score of a pair is the class of both texts together; without activation it is the logit."""
    pair = QUERY + DOCUMENTS[1]
    assert scores(daemon, "reranker")[1] == pytest.approx(
        ask(daemon, "/classify", model="reranker", input=pair)["data"][0]["probs"][0]
    )
    (one,) = ask(daemon, "/classify", model="reranker", input=pair)["data"]
    (logit,) = ask(daemon, "/pooling", model="reranker", input=pair, use_activation=False)["data"][0]["data"]
    assert one["num_classes"] == 1
    assert math.isclose(one["probs"][0], 1 / (1 + math.exp(-logit)), rel_tol=1e-4)


def test_pooling_returns_the_embedding(daemon: DaemonProcess) -> None:
    """What has no route of its own is requested here."""
    (answer,) = ask(daemon, "/pooling", model="embedder", input="a block table")["data"]
    assert np.allclose(answer["data"], embeddings(daemon, ["a block table"])[0], atol=1e-6)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/rerank", {"model": "reranker", "query": "x"}, "documents"),
        ("/rerank", {"model": "reranker", "documents": ["x"]}, "query"),
        ("/rerank", {"model": "reranker", "query": "x", "documents": []}, None),
        ("/rerank", {"model": "reranker", "query": "x", "documents": ["x"] * 20_000}, "documents"),
        ("/rerank", {"model": "reranker", "query": "x", "documents": ["x"] * 2048}, "documents"),
        ("/rerank", {"model": "reranker", "query": "x", "documents": [{"title": "x"}]}, "documents"),
        ("/v1/embeddings", {"model": "embedder", "input": [[1]] * 2049}, "input"),
        ("/rerank", {"model": "reranker", "query": "x", "documents": ["x"], "top_n": -1}, "top_n"),
        ("/score", {"model": "reranker", "queries": ["x", "y"], "documents": ["x", "y", "z"]}, None),
        (
            "/score",
            {
                "model": "reranker",
                "queries": "x",
                "documents": {"content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]},
            },
            "documents.0.content",
        ),
        ("/score", PAIR | {"max_tokens_per_doc": -1}, "max_tokens_per_doc"),
        ("/classify", {"model": "embedder", "input": "x"}, "model"),
        ("/v1/embeddings", {"model": "reranker", "input": "x"}, "model"),
        ("/v2/embed", {"model": "reranker", "texts": ["x"]}, "model"),
        ("/v2/embed", {"model": "embedder", "texts": ["x"] * 2049}, "texts"),
        ("/v2/embed", {"model": "embedder", "inputs": [{"content": []}] * 257}, "inputs"),
        ("/v2/embed", {"model": "embedder", "texts": ["x"], "embedding_types": ["float128"]}, "embedding_types.0"),
        ("/v1/chat/completions", {"model": "embedder", "messages": [{"role": "user", "content": "x"}]}, "model"),
        ("/pooling", {"model": "embedder", "input": "x", "task": "classify"}, "task"),
        ("/pooling", {"model": "embedder", "data": {}}, "input"),
        ("/v1/embeddings", {"model": "embedder", "input": [{"role": "user"}] * 257}, "input"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_scored_is_refused(
    daemon: DaemonProcess, path: str, fields: dict[str, Any], param: str | None
) -> None:
    """A client learns which field to fix; the daemon serves on."""
    answered = request(daemon.url, "POST", path, fields)
    error = answered.json()["error"]
    assert answered.status == 400, answered.body
    assert error["param"] == param
    assert len(scores(daemon, "embedder")) == 3


def test_an_unknown_model_is_refused(daemon: DaemonProcess) -> None:
    """Even where vLLM would answer with the model that it has."""
    answered = request(daemon.url, "POST", "/rerank", {"model": "other", "query": "x", "documents": ["x"]})
    assert (answered.status, answered.json()["error"]["code"]) == (404, "model_not_found")


def test_only_user_relevant_lines_are_printed(daemon: DaemonProcess) -> None:
    """The suggested command works with the first model, and no library warns into the log."""
    assert len(embeddings(daemon, ["x"])) == 1
    daemon.stop()
    printed = "\n".join(daemon.lines)
    assert "/v1/embeddings" in printed
    assert "Warning" not in printed
