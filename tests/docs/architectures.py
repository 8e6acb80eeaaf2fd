"""What each architecture in vLLM's registry keeps of a request, read from the pinned version's source.

A model's class names the classes of its layers, they name others, and the last ones are vLLM's own layers of attention
or of states.  So nothing is imported, and the answer is the same where a model's code needs a package that is not here.
What depends on a model's configuration is counted as being there.
"""

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FULL, LATENT, WINDOWS, CHUNKS, STATE, ENCODED = (
    "FullAttentionSpec",
    "MLAAttentionSpec",
    "SlidingWindowSpec",
    "ChunkedLocalAttentionSpec",
    "MambaSpec",
    "CrossAttentionSpec",
)
OTHER = "another"
"""Blocks of a kind that `melld.kvstore.kept` does not know."""
KEEPS = {
    "Attention": FULL,
    "MLAAttention": LATENT,
    "MultiHeadLatentAttentionWrapper": LATENT,
    "ChunkedLocalAttention": CHUNKS,
    "CrossAttention": ENCODED,
    "WhisperCrossAttention": ENCODED,
    "IsHybrid": STATE,
    "HasInnerState": STATE,
    "MambaBase": STATE,
    **{spec: spec for spec in (FULL, LATENT, WINDOWS, STATE)},
    "StaticSinkAttention": OTHER,
    "SinkFullAttentionSpec": OTHER,
    "SlidingWindowMLASpec": OTHER,
    "CircularBufferSpec": OTHER,
    "RSWASpec": OTHER,
    "SparseAttnIndexer": OTHER,
    "SparseCacheRole": OTHER,
}
"""By the name of a class in a model's source."""
INDEXER = {"SparseAttnIndexer", "SparseCacheRole"}
WINDOW_WORDS = ("sliding_window", "per_layer_sliding_window")
WORD = re.compile(r"\w+")
DEFINITION = re.compile(r"^(?=class |def )", re.MULTILINE)
IMPORT = re.compile(r"^from (?:\.|vllm\.model_executor\.models\.)(\w[\w.]*) import (\([^)]*\)|.*)$", re.MULTILINE)
DEFAULT_FOLDER = "vllm.model_executor.models"
TEXT, POOLING, DRAFTERS = "text", "pooling", "drafters"


class Architecture(NamedTuple):
    """One name in vLLM's registry."""

    name: str
    use: str
    keeps: frozenset[str]


@functools.cache
def architectures() -> list[Architecture]:
    """Return the whole registry, in order; a duplicate name counts by its first use."""
    found: dict[str, Architecture] = {}
    for table, use in TABLES.items():
        for name, (module, model) in _table(table).items():
            found.setdefault(name, Architecture(name, use, _keeps(_file_of(module), model)))
    return list(found.values())


TABLES = {
    "_TEXT_GENERATION_MODELS": TEXT,
    "_MULTIMODAL_MODELS": TEXT,
    "_TRANSFORMERS_SUPPORTED_MODELS": TEXT,
    "_TRANSFORMERS_BACKEND_MODELS": TEXT,
    "_EMBEDDING_MODELS": POOLING,
    "_LATE_INTERACTION_MODELS": POOLING,
    "_REWARD_MODELS": POOLING,
    "_TOKEN_CLASSIFICATION_MODELS": POOLING,
    "_SEQUENCE_CLASSIFICATION_MODELS": POOLING,
    "_SPECULATIVE_DECODING_MODELS": DRAFTERS,
}


@functools.cache
def _root() -> Path:
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def _file_of(module: str) -> Path:
    """Return the file or package of a module as the registry names it."""
    whole = module if module.startswith("vllm.") else f"{DEFAULT_FOLDER}.{module}"
    path = _root().joinpath(*whole.split(".")[1:])
    return path if path.is_dir() else path.with_suffix(".py")


def _table(name: str) -> dict[str, tuple[str, str]]:
    """Return one of the registry's tables, including entries copied from another."""
    tree = ast.parse((_root() / "model_executor" / "models" / "registry.py").read_text())
    (table,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name and isinstance(node.value, ast.Dict)
    )
    pairs = zip(table.keys, table.values, strict=True)
    return {ast.literal_eval(key): ast.literal_eval(value) for key, value in pairs if key is not None}


@functools.cache
def _keeps(path: Path, model: str) -> frozenset[str]:
    """Return what the model's layers keep."""
    if path.is_dir():  # an implementation for each platform: all that any of them names
        words = {word for file in path.rglob("*.py") for word in WORD.findall(file.read_text())}
    else:  # beside its V3.2's indexer, which has a package of its own
        words = {word for words in _reached(path, model) for word in words} - INDEXER
    kept = {kind for name, kind in KEEPS.items() if name in words}
    kept |= {FULL} if "IsHybrid" in words and LATENT not in kept else set()
    kept |= {WINDOWS} if FULL in kept and words & set(WINDOW_WORDS) else set()
    if not path.is_dir() and "CrossAttention" not in path.read_text():  # Whisper's encoder alone, as many have it
        kept.discard(ENCODED)
    return frozenset(kept)


def _reached(path: Path, model: str) -> Iterator[frozenset[str]]:
    """Return all words of the model's class and, recursively, of the classes and functions that it names."""
    waiting, seen = [(path, model)], set()
    while waiting:
        place = waiting.pop()
        if place in seen:
            continue
        seen.add(place)
        file, name = place
        words = _definitions(file).get(name, frozenset())
        yield words
        waiting += [(file, word) for word in words & _definitions(file).keys()]
        waiting += [_imports(file)[word] for word in words & _imports(file).keys()]


@functools.cache
def _definitions(path: Path) -> dict[str, frozenset[str]]:
    """Return the words of each class and function of a file."""
    parts = DEFINITION.split(path.read_text()) if path.is_file() else []
    return {WORD.findall(part)[1]: frozenset(WORD.findall(part)) for part in parts[1:]}


@functools.cache
def _imports(path: Path) -> dict[str, tuple[Path, str]]:
    """Return the origins of the names that a model's file imports from its folder."""
    found = IMPORT.findall(path.read_text()) if path.is_file() else []
    return {
        name: (path.parent.joinpath(*module.split(".")).with_suffix(".py"), name)
        for module, names in found
        for name in WORD.findall(names)
    }
