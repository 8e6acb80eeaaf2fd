"""Models, cards and step times: published figures, and the measured tables behind the times."""

import csv
import gzip
import json
import pathlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from melld.errors import ConfigError
from melld.simulator.catalogue import (
    CARDS,
    MODELS,
    card_by_name,
    kv_capacity_bytes,
    model_by_name,
    model_from_config,
)
from melld.simulator.latency import profile_for

TABLE = pathlib.Path(__file__).parents[2] / ".." / "shared" / "traces" / "latency_table.csv.gz"
LLAMA_2_7B = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32,
    "num_hidden_layers": 32, "vocab_size": 32000,
}  # fmt: skip
LLAMA_3_1_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_hidden_layers": 32, "vocab_size": 128256,
}  # fmt: skip


@pytest.mark.parametrize(("name", "config"), [("llama-2-7b", LLAMA_2_7B), ("llama-3.1-8b", LLAMA_3_1_8B)])
def test_a_config_describes_its_model_as_the_name_would(name: str, config: dict[str, int]) -> None:
    """A model that is not in the list costs the same as one that is."""
    described = model_from_config(name, config)
    assert described.parameters == MODELS[name].parameters
    assert described.bytes_per_token == MODELS[name].bytes_per_token


def test_a_model_may_be_a_folder_with_a_config(tmp_path: pathlib.Path) -> None:
    """The path that `melld serve` takes works here too."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_2_7B))
    assert model_by_name(str(tmp_path)) == model_by_name(str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "not json", '{"hidden_size": "x"}', json.dumps({**LLAMA_2_7B, "num_attention_heads": 0})]
)
def test_a_config_that_describes_nothing_is_refused(tmp_path: pathlib.Path, text: str) -> None:
    """One clear line, whatever is in the file."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="does not describe"):
        model_by_name(str(tmp_path))


def test_unknown_names_list_the_known_ones() -> None:
    """A typo is fixed without opening the manual."""
    with pytest.raises(ConfigError, match="llama-2-13b"):
        model_by_name("lama-13b")
    with pytest.raises(ConfigError, match="rtx-4090"):
        card_by_name("rtx4090")
    assert card_by_name("24GiB").memory_bytes == 24 * 2**30


def test_the_paper_s_machines_hold_what_vllm_gives_them() -> None:
    """13B on 40 GB leaves about 12 GB for KV blocks, the figure in vLLM's paper."""
    capacity_bytes = kv_capacity_bytes(MODELS["llama-2-13b"], CARDS["a100-40g"])
    assert 11e9 < capacity_bytes < 12.5e9
    assert capacity_bytes % (16 * MODELS["llama-2-13b"].bytes_per_token) == 0
    with pytest.raises(ConfigError, match="does not fit"):
        kv_capacity_bytes(MODELS["llama-2-13b"], CARDS["rtx-4090"])


@pytest.mark.skipif(not TABLE.exists(), reason="the measured table is not beside the repository")
@pytest.mark.parametrize(
    ("table_model", "table_gpu", "model", "card"),
    [
        ("llama-2-7b", "RTX4090-24GB", "llama-2-7b", "rtx-4090"),
        ("llama-3.1-8b", "RTX4090-24GB", "llama-3.1-8b", "rtx-4090"),
        ("opt-13b", "A100-80GB", "opt-13b", "a100-80g"),
    ],
)
def test_step_times_match_the_measurements(table_model: str, table_gpu: str, model: str, card: str) -> None:
    """The shipped table is a fit; it must stay within a few percent of every point that it was fitted to."""
    profile = profile_for(MODELS[model], CARDS[card])
    with gzip.open(TABLE, "rt") as file:
        rows = [row for row in csv.DictReader(file) if (row["model"], row["gpu"]) == (table_model, table_gpu)]
    assert len(rows) > 40
    for row in rows:
        batch, context, tokens = int(row["batch"]), int(row["context_per_seq"]), int(row["new_tokens"])
        if row["phase"] == "decode":
            found_s = float(profile.step_s(np.array([float(batch)]), np.array([float(batch * context)]))[0])
        else:
            found_s = profile.prefill_s(tokens)
        tolerance = 0.05 if row["phase"] == "decode" else 0.25 if tokens < 512 else 0.05
        assert found_s * 1e3 == pytest.approx(float(row["time_ms"]), rel=tolerance), row


@given(
    st.sampled_from(sorted(MODELS)),
    st.sampled_from(sorted(CARDS)),
    st.integers(1, 5000),
    st.integers(1, 10**7),
)
def test_more_work_never_takes_less_time(model: str, card: str, batch: int, context: int) -> None:
    """Scaled and extrapolated profiles must stay plausible everywhere."""
    profile = profile_for(MODELS[model], CARDS[card])
    steps = profile.step_s(np.array([batch, batch], dtype=float), np.array([context, 2 * context], dtype=float))
    assert 0 < steps[0] <= steps[1]
    assert 0 < profile.prefill_s(context) <= profile.prefill_s(context + 100)


def test_a_card_with_slower_memory_decodes_slower() -> None:
    """13B on the 40 GB card is the 80 GB card's profile at the ratio of their memory bandwidths."""
    small, large = (profile_for(MODELS["llama-2-13b"], CARDS[card]) for card in ("a100-40g", "a100-80g"))
    one = np.ones(1)
    assert small.step_s(one, 1000 * one)[0] / large.step_s(one, 1000 * one)[0] == pytest.approx(1.311, abs=0.001)
    assert small.prefill_s(1000) == large.prefill_s(1000)
