"""All families by name, and how a test gets a family's model."""

from pathlib import Path

from tests.families.family import Family, make_family
from tests.families.heads import HEADS
from tests.families.images import IMAGES
from tests.families.poolers import POOLERS
from tests.families.texts import TEXTS

FAMILIES: dict[str, Family] = TEXTS | POOLERS | HEADS
MICRO = TEXTS["granite4_h"]._replace(
    fields={**TEXTS["granite4_h"].fields, "num_local_experts": 0, "num_experts_per_tok": 0, "mamba_d_state": 8}
)
FEW = {"num_hidden_layers": 3}
LIGHT: dict[str, Family] = {
    "granite4_h_micro": MICRO,
    "granite4_h_small": MICRO._replace(
        fields={**MICRO.fields, **FEW, "layer_types": ["mamba", "attention", "mamba"]},
    ),
    "gemma3_small": TEXTS["gemma3"]._replace(
        fields={**TEXTS["gemma3"].fields, **FEW, "layer_types": TEXTS["gemma3"].fields["layer_types"][:3]}
    ),
}
"""What many tests run, in place of the family itself: as 4.0 H Micro it has no experts; a state is half as large, and
with it a block of the prefix cache.  The small ones have one layer in each group of KV blocks."""
WITHOUT_CPU = {
    "nemotron_h_moe": "vLLM's CPU build has no ungated experts",
    "minimax_m2": "vLLM's CPU build only selects experts by softmax or in groups",
    "kimi_linear": "vLLM's CPU build has no such layers",
    "olmo_hybrid": "vLLM's CPU build has no such layers",
    "qwen3_next_mtp": "vLLM's CPU build drafts beside states only without a prefix cache",
}
"""Families that vLLM does not run on a CPU, and why."""


def make_model_of(name: str, directory: Path) -> None:
    """Write the tiny model of this family into `directory`."""
    make_family((FAMILIES | LIGHT | IMAGES)[name], directory)
