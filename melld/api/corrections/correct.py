"""Puts the corrections in place of what vLLM's serving classes of a model do wrong."""

from starlette.datastructures import State

from melld.api.corrections.completions import Completions
from melld.api.corrections.lengths import tell_lengths
from melld.api.corrections.many_texts import serve_many_texts
from melld.api.corrections.rerank import Scores

_CLASSES = {"openai_serving_completion": Completions, "serving_scores": Scores}


def correct(serving: State) -> None:
    """Correct a model's serving classes, once."""
    for name, corrected in _CLASSES.items():
        if (handler := getattr(serving, name, None)) is not None:
            handler.__class__ = corrected
    tell_lengths(serving)
    serve_many_texts(serving)
