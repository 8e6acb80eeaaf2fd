"""Builds vLLM's configuration and front end before there is a worker, and reports early what vLLM refuses.

Owns the one line that a user reads instead of vLLM's traceback.  Never starts anything or touches a device.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from jinja2 import TemplateError
from pydantic import ValidationError
from transformers.utils.chat_template_utils import _compile_jinja_template
from vllm.config import VllmConfig
from vllm.reasoning import ReasoningParserManager
from vllm.renderers.chat_utils import load_chat_template
from vllm.tool_parsers import ToolParserManager

from melld.config import Config
from melld.engine.answer_formats import AUTO, NONE
from melld.engine.arguments import engine_arguments, import_parsers
from melld.engine.frontend.frontend import vllm_config_of
from melld.engine.frontend.prepared import Prepared, front_of, serving_arguments
from melld.engine.layers import kept_by, specs_without_weights
from melld.engine.model_files import REASONING_KEY, TOOLS_KEY, answer_formats
from melld.engine.vllm_options import named_option
from melld.errors import ConfigError, MelldError
from melld.kvstore.kept import moves_text
from melld.migrate.snapshot import MoveRefusal
from melld.nearest import did_you_mean

log = logging.getLogger(__name__)
LONGEST_REASON = 400
UNTOLD = "known after startup"


def read(config: Config, device_kind: str) -> VllmConfig:
    """Return vLLM's configuration, from which the model's size is known.

    Raises:
        ConfigError: vLLM refuses an option, or the model's files.
    """
    with told_in_one_line(config):
        engine = engine_arguments(config, device_kind)
        if not config.model.vllm_option("reasoning_parser_plugin"):  # vLLM words this refusal differently
            _check_parser(REASONING_KEY, answer_formats(config.model).reasoning.parser, ReasoningParserManager)
        return vllm_config_of(config, engine)


def prepare(config: Config, device_kind: str, vllm_config: VllmConfig | None = None) -> Prepared:
    """Build a front end for vLLM's configuration, by default as `read` returns it.

    Takes seconds: to be called in a thread.

    Raises:
        ConfigError: vLLM refuses an option, or the model's files.
    """
    vllm_config = vllm_config or read(config, device_kind)
    with told_in_one_line(config):
        engine = engine_arguments(config, device_kind)
        arguments = serving_arguments(config, engine, vllm_config)
        _check_drafts(vllm_config)
        if arguments.tool_parser_plugin:
            import_parsers("tool_parser_plugin", arguments.tool_parser_plugin)
        _check_parser(TOOLS_KEY, arguments.tool_call_parser, ToolParserManager)
        if arguments.chat_template is not None:
            _compile_jinja_template(load_chat_template(arguments.chat_template))
        model = vllm_config.model_config
        task = "transcription" if model.is_encoder_decoder else "generate"  # a pooling model's worker tells its own
        return front_of(vllm_config, arguments, (task,) if model.runner_type == "generate" else ())


def prepare_all(configs: Mapping[str, Config], device_kind: str, read: Mapping[str, VllmConfig]) -> dict[str, Prepared]:
    """Build a front end for each configuration that vLLM has read, by name; none if one is refused.

    Raises:
        ConfigError: see `prepare`.
    """
    prepared = {}
    with contextlib.ExitStack() as undo:
        for name, vllm_config in read.items():
            prepared[name] = prepare(configs[name], device_kind, vllm_config)
            undo.callback(prepared[name].frontend.shutdown)
        undo.pop_all()
    return prepared


def _check_parser(key: str, parser: str | None, manager: Any) -> None:
    """Refuse a parser that vLLM does not know, suggesting the nearest one.

    Raises:
        ConfigError: there is no such parser.
    """
    known = manager.list_registered()
    if parser is not None and parser not in known:
        others = f"{AUTO}, {NONE}, {', '.join(sorted(known))}"
        raise ConfigError(f"[model.vllm] {key}", f"{parser!r} is not one of {others}{did_you_mean(parser, known)}")


def _check_drafts(vllm_config: VllmConfig) -> None:
    """Refuse drafts if they would change the text, or crash vLLM's CPU build.

    Raises:
        ConfigError: a model with recurrent state drafts on a CPU; only gated delta nets may, without a prefix cache.
    """
    model, drafts = vllm_config.model_config, vllm_config.speculative_config is not None
    if not (drafts and model.has_inner_state and vllm_config.device_config.device_type == "cpu"):
        return
    if not hasattr(model.hf_text_config, "linear_num_key_heads"):
        raise ConfigError(
            "[model.vllm] speculative_config",
            "vLLM generates different text with speculative decoding on CPUs: remove this option",
        )
    if vllm_config.cache_config.enable_prefix_caching:
        why = "on CPUs, speculative decoding of a model with states requires enable_prefix_caching = false"
        raise ConfigError("[model.vllm] speculative_config", why)


def moves_of(vllm_config: VllmConfig) -> str:
    """Return how requests of the model will move, as far as known without a worker.  Only for `check-config`.

    vLLM can build a model for several devices only in as many processes, and some models only on the device itself.
    """
    if vllm_config.parallel_config.world_size > 1:
        return UNTOLD
    try:
        kept = kept_by(specs_without_weights(vllm_config))
    except Exception:  # whatever it is, the workers will report it
        log.debug("the model cannot be built without weights", exc_info=True)
        return UNTOLD
    refusal = MoveRefusal.SPECULATIVE.value if vllm_config.num_prefill_lookahead_tokens > 1 else ""
    return moves_text(kept, vllm_config.model_config.runner_type == "generate", refusal=refusal)


@contextlib.contextmanager
def told_in_one_line(config: Config) -> Iterator[None]:
    """Convert vLLM's error to a `ConfigError` that names the key; log the traceback at debug level."""
    try:
        yield
    except MelldError:
        raise
    except Exception as error:  # vLLM raises errors of any kind
        log.debug("vLLM rejects the configuration", exc_info=True)
        raise refusal(error, {key.replace("-", "_"): value for key, value in config.model.vllm.items()}) from error


def refusal(error: Exception, options: Mapping[str, Any]) -> ConfigError:
    """Return a one-line error that names the option at fault, among those given."""
    field, words = _said(error)
    if "torchvision" in words:
        words = f"image inputs need torchvision, which is missing or does not load: `make setup` installs it ({words})"
        return ConfigError("[model] path", words)
    key = _key(field, words, options)
    reason = words if not field or field == key else f"{field}: {words}"
    reason = reason if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON]}..."
    if key is not None:
        return ConfigError(f"[model.vllm] {key}", reason)
    return ConfigError("[model.vllm]" if options else "[model] path", reason)


def _said(error: Exception) -> tuple[str, str]:
    """Return the field of a pydantic error, else "", and the message."""
    if isinstance(error, TemplateError):
        return "chat_template", f"is not a Jinja template: {error}"
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        field = str(first["loc"][0]) if first["loc"] else ""
        return field, " ".join(str(first["msg"]).removeprefix("Value error, ").split())
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return "", " ".join(text.removeprefix("Error: ").split()) or type(error).__name__


def _key(field: str, words: str, options: Mapping[str, Any]) -> str | None:
    """Return the option whose value is quoted, else the first named, else one with its value named, else the only."""
    if field in options:
        return field
    for key, value in options.items():
        if f"'{value}'" in words:
            return key
    if (named := named_option(words, options)) is not None:
        return named
    for key, value in options.items():
        if (isinstance(value, str) and value and value in words) or (isinstance(value, dict) and field in value):
            return key
    return next(iter(options)) if len(options) == 1 else None
