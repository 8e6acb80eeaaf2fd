"""Vision families, whose processors need torchvision: each a tiny language model behind a tiny vision tower."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from melld.demo_model import VOCABULARY
from melld.engine.image_library import make_importable
from tests.families.family import COMMON, HIDDEN, Family
from tests.families.texts import TEXTS

make_importable()  # before anything asks transformers whether torchvision is there
VISION = {"hidden_size": 64, "intermediate_size": 128}
PARTS = """\
{{- bos_token -}}
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.content is string -%}{{- message.content -}}{%- else -%}
        {%- for part in message.content -%}{{- part.text if part.type == 'text' else '[IMG]' -}}{%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""A chat template that goes through the parts of a message."""
PIXELS = 64
"""Images are about so wide and high when the tower sees them."""


def _family(
    config: str, text: Mapping[str, Any], tokens: tuple[str, ...], vision: dict[str, Any], **more: Any
) -> Family:
    """Return a family with this language model; `tokens`: what stands for images in its prompts."""
    fields = {key: value for key, value in {**COMMON, **text}.items() if value is not None}
    finish = more.pop("finish")
    return Family(
        config,
        f"{config}ForConditionalGeneration",
        {
            **dict.fromkeys(COMMON),
            "tie_word_embeddings": False,
            "text_config": fields | {"vocab_size": VOCABULARY + len(tokens)},
            "vision_config": VISION | vision,
            **more,
        },
        finish=partial(_finish, tokens, finish),
    )


def _finish(tokens: tuple[str, ...], processor_of: Callable[[Any], Any], directory: Path) -> None:
    """Add the tokens to the tokenizer, and write the image processor's configuration."""
    from tokenizers import AddedToken, Tokenizer
    from transformers import AutoTokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    tokenizer.save(str(directory / "tokenizer.json"))
    named = GEMMA_NAMES if tokens is GEMMA_TOKENS else {}
    processor_of(AutoTokenizer.from_pretrained(directory, extra_special_tokens=named)).save_pretrained(directory)


def _qwen_processor(tokenizer: Any) -> Any:
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    size = {"shortest_edge": PIXELS**2, "longest_edge": PIXELS**2}
    sizes = {"size": size, "patch_size": 8, "temporal_patch_size": 2, "merge_size": 2}
    return Qwen3VLProcessor(Qwen2VLImageProcessor(**sizes), tokenizer, Qwen3VLVideoProcessor(**sizes))


def _pixtral_processor(tokenizer: Any) -> Any:
    from transformers import PixtralImageProcessor, PixtralProcessor

    images = PixtralImageProcessor(size={"longest_edge": PIXELS}, patch_size={"height": 8, "width": 8})
    tokenizer.chat_template = PARTS  # vLLM knows no text that would stand for its images
    return PixtralProcessor(images, tokenizer, patch_size=8, spatial_merge_size=2)


def _gemma_processor(tokenizer: Any) -> Any:
    from transformers import (
        Gemma4AudioFeatureExtractor,
        Gemma4ImageProcessor,
        Gemma4Processor,
        Gemma4VideoProcessor,
    )

    images = Gemma4ImageProcessor(patch_size=8, max_soft_tokens=70)
    return Gemma4Processor(
        Gemma4AudioFeatureExtractor(), images, tokenizer, Gemma4VideoProcessor(patch_size=8), image_seq_length=70
    )


QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PIXTRAL_TOKENS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
GEMMA_TOKENS = ("<|image>", "<image_soft_token>", "<image|>", "<|video|>", "<|audio>", "<|audio|>", "<audio|>")
GEMMA_NAMES = dict(zip(("boi_token", "image_token", "eoi_token"), GEMMA_TOKENS, strict=False)) | dict(
    zip(("boa_token", "audio_token", "eoa_token"), GEMMA_TOKENS[4:], strict=True)
)
IMAGES = {
    "qwen3_vl": _family(
        "Qwen3VL",
        TEXTS["qwen3"].fields
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [6, 5, 5]}},
        QWEN_TOKENS,
        {"depth": 2, "num_heads": 2, "patch_size": 8, "out_hidden_size": HIDDEN, "num_position_embeddings": 64}
        | {"deepstack_visual_indexes": [0, 1]},
        vision_start_token_id=VOCABULARY,
        vision_end_token_id=VOCABULARY + 1,
        image_token_id=VOCABULARY + 2,
        video_token_id=VOCABULARY + 3,
        finish=_qwen_processor,
    ),
    "qwen3_5_vision": _family(  # states beside images
        "Qwen3_5",
        TEXTS["qwen3_5"].fields
        | {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.5,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            }
        },
        QWEN_TOKENS,
        {"depth": 2, "num_heads": 2, "patch_size": 8, "out_hidden_size": HIDDEN, "num_position_embeddings": 64},
        vision_start_token_id=VOCABULARY,
        vision_end_token_id=VOCABULARY + 1,
        image_token_id=VOCABULARY + 2,
        video_token_id=VOCABULARY + 3,
        finish=_qwen_processor,
    ),
    "pixtral": _family(  # as Mistral Small 3 and Ministral 3
        "Mistral3",
        TEXTS["ministral3"].fields | {"model_type": "ministral3"},
        PIXTRAL_TOKENS,
        {"model_type": "pixtral", "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 8}
        | {"image_size": PIXELS},
        image_token_index=VOCABULARY,
        finish=_pixtral_processor,
    ),
    "gemma4_vision": _family(
        "Gemma4",
        TEXTS["gemma4"].fields,
        GEMMA_TOKENS,
        {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "patch_size": 8}
        | {"position_embedding_size": 1024, "default_output_length": 70},
        boi_token_id=VOCABULARY,
        image_token_id=VOCABULARY + 1,
        eoi_token_id=VOCABULARY + 2,
        video_token_id=VOCABULARY + 3,
        boa_token_id=VOCABULARY + 4,
        audio_token_id=VOCABULARY + 5,
        eoa_token_index=VOCABULARY + 6,
        finish=_gemma_processor,
    ),
}
