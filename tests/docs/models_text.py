"""Write docs/models.md from vLLM's registry and melld's table of what moves: `python -m tests.docs.models_text`."""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from melld.kvstore.kept import KINDS, Kept, are_known, moves_text, uncopied
from tests.docs.architectures import (
    CHUNKS,
    DRAFTERS,
    ENCODED,
    FULL,
    LATENT,
    POOLING,
    STATE,
    TEXT,
    WINDOWS,
    architectures,
)
from tests.families.every import FAMILIES, WITHOUT_CPU
from tests.families.images import IMAGES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
INTRODUCTION = """\
# Models

melld serves every model that the pinned vLLM serves. Whether running requests can *move* between workers depends on
what the model keeps for them: a move by KV copies it, a move by tokens recomputes it. Models whose requests cannot move
are served too, and after a worker crash every request resumes from its tokens. `melld check-config` and the startup log
tell you about your model:

```
# demo moves: KV with state, 65 MB + 20 KB a token
```

means a fixed size per request plus a size per token.

Each row of the first table is tested with tiny models of the family's shape and random weights, on CPUs (`make
test-all`, `make bench WHAT=families`): output equal to plain vLLM's, also when moved and after `kill -9`. The second
table is derived from vLLM's source, assuming that anything that depends on a model's configuration is present; 27 of
its models are tested in the same way (`benchmarks/results/families.json`).
"""


class Row(NamedTuple):
    """A model family by its common name."""

    told: str
    models: tuple[str, ...]
    """Its tiny models, by their names in `tests.families`."""
    keeps: tuple[str, ...]
    """What each of its layers keeps, by the names of `melld.kvstore.kept`."""
    classes: tuple[str, ...] = ()
    """Further vLLM classes, of models that other tests create."""


ROWS = (
    Row("Qwen3.5, Qwen3.6", ("qwen3_5", "qwen3_5_moe", "qwen3_5_vision"), (FULL, STATE)),
    Row("Gemma 4", ("gemma4", "gemma4_e", "gemma4_vision"), (FULL, WINDOWS)),
    Row("Qwen3-VL", ("qwen3_vl",), (FULL,)),
    Row("gpt-oss", ("gpt_oss",), (FULL, WINDOWS)),
    Row("Qwen3, Qwen3-Coder", ("qwen3", "qwen3_moe"), (FULL,)),
    Row("nomic, bge, mxbai, ModernBERT", ("nomic", "bge_m3", "bge_reranker", "bert", "modernbert"), ()),
    Row("Qwen3-Embedding, Qwen3-Reranker", ("qwen3_embedding", "qwen3_reranker"), (FULL,)),
    Row("Llama 3", ("llama3",), (FULL,)),
    Row("Gemma 3", ("gemma3",), (FULL, WINDOWS)),
    Row("GLM-4.7-Flash", ("glm4_moe_lite",), (LATENT,)),
    Row("Ministral 3, Devstral 2", ("ministral3", "pixtral"), (FULL,)),
    Row("Nemotron 3 Nano, Nemotron-H", ("nemotron_h", "nemotron_h_moe"), (FULL, STATE)),
    Row("DeepSeek V3", ("deepseek_v3",), (LATENT,)),
    Row("Qwen3-Next, Qwen3-Coder-Next", ("qwen3_next",), (FULL, STATE)),
    Row("Granite 4 H", ("granite4_h",), (FULL, STATE)),
    Row("LFM2, LFM2.5", ("lfm2", "lfm2_moe"), (FULL, STATE)),
    Row("Phi-4, Seed-OSS, ERNIE 4.5", ("phi4", "seed_oss", "ernie4_5"), (FULL,)),
    Row("Olmo 3", ("olmo3",), (FULL, WINDOWS)),
    Row("GLM-4.5 to 4.7, MiniMax M2", ("glm4_moe", "minimax_m2"), (FULL,)),
    Row("Llama 4", ("llama4",), (FULL, CHUNKS)),
    Row("Whisper", (), (FULL, ENCODED), ("WhisperForConditionalGeneration",)),
)
WORDS = {FULL: "full attention", **{name: kind.told for name, kind in KINDS.items() if kind.told}}
UNTOLD = "same as their language model"


def models_text() -> str:
    """Return the whole page."""
    lines = [INTRODUCTION, "## Most used families\n"]
    lines += ["| family | vLLM's classes | keeps | by KV | by tokens | on CPUs |", "|---|---|---|---|---|---|"]
    lines += [_row(row) for row in ROWS]
    lines += ["", "## Every architecture\n", "| moves | architectures |", "|---|---|"]
    lines += [f"| {moves} | {', '.join(names)} |" for moves, names in _by_moves(TEXT, POOLING)]
    lines += ["", "## Drafters\n", "Requests move as without a drafter, unless the drafter keeps something else. With"]
    lines += ["several MTP modules, or next to states, nothing moves.\n"]
    lines += ["| its own layers | drafters |", "|---|---|"]
    lines += [f"| {moves} | {', '.join(names)} |" for moves, names in _by_moves(DRAFTERS)]
    return "\n".join(lines) + "\n"


def _row(row: Row) -> str:
    families = [(FAMILIES | IMAGES)[name] for name in row.models]
    classes = ", ".join(dict.fromkeys([*(family.model for family in families), *row.classes]))
    pools = bool(families) and all("runner" in family.options for family in families)
    ways = ("stay", "stay") if pools else _ways(row.keeps)
    lacking = "; ".join(f"`{name}` no: {why}" for name in row.models if (why := WITHOUT_CPU.get(name)))
    kept = ", ".join(WORDS[name] for name in row.keeps) or "nothing"
    return f"| {' | '.join((row.told, classes, kept, *ways, lacking or 'yes'))} |"


def _ways(keeps: Collection[str]) -> tuple[str, str]:
    if not are_known(keeps):
        return "untried", "untried"
    why = ", ".join(uncopied(keeps))
    return f"no: {why}" if why else "yes", "yes"


def _by_moves(*uses: str) -> Iterable[tuple[str, list[str]]]:
    """Return the architectures for these uses, grouped by how requests move."""
    found: dict[str, list[str]] = {}
    for one in architectures():
        if one.use in uses:
            keeps = tuple(sorted(one.keeps, key=[*KINDS, *one.keeps].index))
            known = keeps or one.use == POOLING
            moves = moves_text(Kept(keeps), one.use != POOLING) if known else UNTOLD
            found.setdefault(moves, []).append(one.name)
    return sorted(found.items(), key=lambda item: -len(item[1]))


if __name__ == "__main__":
    PAGE.write_text(models_text())
