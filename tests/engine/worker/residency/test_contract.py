"""What melld assumes about the pinned vLLM's inside.  An upgrade that breaks an assumption fails here, by name."""

import ast
import importlib.util
import inspect
from pathlib import Path

import pytest
import torch

from tests.engine.worker.residency import contract
from tests.engine.worker.residency.driver import WorkerProxy

ASSUMPTIONS = [
    name
    for name, value in vars(contract).items()
    if inspect.isfunction(value) and value.__module__ == contract.__name__ and not name.startswith("_")
]


@pytest.mark.parametrize("assumption", ASSUMPTIONS)
def test_vllm_matches_residency_s_assumptions(
    residency_workers: tuple[WorkerProxy, WorkerProxy], assumption: str
) -> None:
    """An upgrade that would garble moved requests is stopped here, and says why."""
    residency_workers[0]("contract", assumption)


def test_cpu_generators_cannot_undo_a_draw() -> None:
    """Once they can, `residency_generator` is no longer needed."""
    with pytest.raises(RuntimeError, match="offset"):
        torch.Generator("cpu").get_offset()


def test_the_v2_runner_drops_preempted_requests_before_adding_any() -> None:
    """With the GPU's runner a frozen request's slot must be free for another in the very next step."""
    assert "preempted_req_ids" in _method("finish_requests")
    body = _method("execute_model")
    assert body.index("self.finish_requests(") < body.index("self.add_requests(")


def test_the_v2_runner_rebuilds_a_request_from_all_its_tokens() -> None:
    """With the GPU's runner an arriving request needs nothing but the scheduler's output."""
    body = _method("add_requests")
    assert "prefill_token_ids" in body
    assert "self._remove_request(req_id)" in body


def _method(name: str) -> str:
    """Return the source of a V2 runner method, which cannot be imported where there is no Triton."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0]) / "v1" / "worker" / "gpu" / "model_runner.py"
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return ast.get_source_segment(source, node) or ""
    raise AssertionError(f"the V2 runner has no {name}")
