"""The texts that streams get past vLLM's output processor."""

from types import SimpleNamespace
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine.detokenizer import SlowIncrementalDetokenizer

from melld.engine.frontend.moulds import KnownMoulds
from melld.engine.frontend.outlet import Outlet


class Letters:
    """A tokenizer that is none of Hugging Face's fast ones: a token for each letter."""

    is_fast = False
    all_special_ids: tuple[int, ...] = ()

    def __len__(self) -> int:
        return 26

    def convert_ids_to_tokens(self, ids: list[int], **_: Any) -> list[str]:
        return [chr(ord("a") + one) for one in ids]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)

    def get_added_vocab(self) -> dict[str, int]:
        return {}


def test_several_tokens_of_one_output_are_decoded_one_by_one() -> None:
    """Merged and drafted tokens of a model with a slow tokenizer read as they would one at a time."""
    request: Any = SimpleNamespace(prompt_token_ids=[0, 1], prompt_embeds=None, sampling_params=SamplingParams())
    tokenizer: Any = Letters()
    state = SimpleNamespace(
        detokenizer=SlowIncrementalDetokenizer(tokenizer, request),
        streaming_input=False,
        parent_req=None,
        stream_interval=1,
        logprobs_processor=SimpleNamespace(num_logprobs=None),
        make_request_output=None,
    )
    waiting = SimpleNamespace(outputs=[SimpleNamespace(text="", token_ids=[])])
    outlet = Outlet(is_raw=True, known=KnownMoulds())
    outlet.opened(SimpleNamespace(aggregate=True, output=waiting), state)
    outlet.add([2, 3, 4])
    assert (waiting.outputs[0].text, waiting.outputs[0].token_ids) == ("cde", [2, 3, 4])
    outlet.hand_back()
    assert state.detokenizer.output_text == "cde"
    assert state.detokenizer.output_token_ids == [2, 3, 4]
