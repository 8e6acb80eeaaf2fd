# ruff: noqa: RUF001
"""Model families by how they write tool calls and thoughts: template markers and sample answers.

Written from the formats' documents.  Every answer calls `get_weather(city="Paris")`, some then the same for Oslo.
"""

from typing import NamedTuple

CITIES = ("Paris", "Oslo")


class Family(NamedTuple):
    """A family.  `one`: the text of a call, with `{city}` in it; `calls`: how several are written."""

    name: str
    model_type: str
    template: str
    tools: str | None
    reasoning: str | None
    one: str = ""
    calls: str = "{calls}"
    between: str = "\n"
    think: tuple[str, str] = ("<think>", "</think>")
    tokens: tuple[str, ...] = ()
    """Special tokens of the tokenizer, besides what stands in `think`."""

    def answer(self, count: int) -> str:
        """Return an answer with this many calls."""
        made = [self.one.replace("{city}", city).replace("{index}", str(n)) for n, city in enumerate(CITIES[:count])]
        return self.calls.replace("{calls}", self.between.join(made))


JSON = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "{city}"}}\n</tool_call>'
XML = "<tool_call>\n<function=get_weather>\n<parameter=city>\n{city}\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{city}</arg_value>\n</tool_call>"
NAMED = '{"name": "get_weather", "arguments": {"city": "{city}"}}'
PYTHON = 'get_weather(city="{city}")'
TOOL_CALL = ("<tool_call>", "</tool_call>")
ARGUMENTS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
SHOWS_JSON = '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
SHOWS_XML = "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\n</tool_call>"
SHOWS_GLM = (
    "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n</tool_call>"
)
SWITCH = "{% if add_generation_prompt %}{% if enable_thinking is false %}<think>\n\n</think>{% endif %}{% endif %}"
OPENS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
LLAMA = 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
KIMI = (
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"),
)

FAMILIES = (
    Family("Qwen 2.5", "qwen2", SHOWS_JSON, "hermes", None, JSON, tokens=TOOL_CALL),
    Family("Qwen 3", "qwen3", SHOWS_JSON + SWITCH, "hermes", "qwen3", JSON, tokens=TOOL_CALL),
    Family("Qwen 3 MoE", "qwen3_moe", SHOWS_JSON + SWITCH, "hermes", "qwen3", JSON, tokens=TOOL_CALL),
    Family("Qwen3-VL", "qwen3_vl", SHOWS_JSON, "hermes", None, JSON, tokens=TOOL_CALL),
    Family("Qwen3-Coder", "qwen3_moe", SHOWS_XML, "qwen3_coder", None, XML, tokens=TOOL_CALL),
    Family("Qwen3-Next", "qwen3_next", SHOWS_JSON + OPENS, "hermes", "qwen3", JSON, tokens=TOOL_CALL),
    Family("Qwen 3.5", "qwen3_5", SHOWS_XML + SWITCH, "qwen3_coder", "qwen3", XML, tokens=TOOL_CALL),
    Family("QwQ", "qwen2", SHOWS_JSON + OPENS, "hermes", "deepseek_r1", JSON, tokens=TOOL_CALL),
    Family("Hermes 3", "llama", SHOWS_JSON, "hermes", None, JSON, tokens=TOOL_CALL),
    Family("Nemotron 3", "nemotron_h", SHOWS_XML + SWITCH, "qwen3_coder", "nemotron_v3", XML, tokens=TOOL_CALL),
    Family("MiMo", "mimo_v2_flash", SHOWS_XML + SWITCH, "mimo", "mimo", XML.replace("\n", ""), tokens=TOOL_CALL),
    Family("Granite 4", "granitemoehybrid", SHOWS_JSON, "granite4", None, JSON, tokens=TOOL_CALL),
    Family(
        *("Granite 3", "granite", "respond with <|tool_call|> followed by a JSON list", "granite", None, NAMED),
        calls="<|tool_call|>[{calls}]",
        between=", ",
        tokens=("<|tool_call|>",),
    ),
    Family(
        "GLM 4.5",
        "glm4_moe",
        SHOWS_GLM + "/nothink <think></think>",
        "glm47",
        "glm45",
        GLM,
        tokens=(*TOOL_CALL, *ARGUMENTS),
    ),
    Family(
        *("GLM-4.7-Flash", "glm4_moe_lite", SHOWS_GLM + "<think></think>", "glm47", "glm45"),
        GLM.replace("\n", ""),
        between="",
        tokens=(*TOOL_CALL, *ARGUMENTS),
    ),
    Family(
        *("Llama 3.1", "llama", "{{- '<|python_tag|>' + tool_call.name }}" + LLAMA, "llama3_json", None),
        '{"name": "get_weather", "parameters": {"city": "{city}"}}',
        between="; ",
        tokens=("<|python_tag|>",),
    ),
    Family(
        *(
            "Llama 3.2",
            "llama",
            LLAMA,
            "llama3_json",
            None,
            '{"name": "get_weather", "parameters": {"city": "{city}"}}',
        ),
        between="; ",
        tokens=("<|python_tag|>",),
    ),
    Family(
        *("Llama 4", "llama4", "[func_name1(params_name1=params_value1)]", "llama4_pythonic", None, PYTHON),
        calls="[{calls}]",
        between=", ",
    ),
    Family(
        *("DeepSeek V3", "deepseek_v3", "<｜tool▁calls▁begin｜>```json```", "deepseek_v3", None),
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "{city}"}\n```<｜tool▁call▁end｜>',
        calls="<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>",
        tokens=DEEPSEEK,
    ),
    Family(
        *(
            "DeepSeek V3.1",
            "deepseek_v3",
            "{% if thinking %}<think>{% endif %}<｜tool▁calls▁begin｜>",
            "deepseek_v31",
            "deepseek_v3",
        ),
        '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "{city}"}<｜tool▁call▁end｜>',
        calls="<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>",
        between="",
        think=("", ""),  # only where the client asks for it
        tokens=DEEPSEEK,
    ),
    Family(
        *("Kimi K2 Thinking", "kimi_k2", "<|tool_calls_section_begin|><think></think>", "kimi_k2", "kimi_k2"),
        "<|tool_call_begin|>functions.get_weather:{index}"
        '<|tool_call_argument_begin|>{"city": "{city}"}<|tool_call_end|>',
        calls="<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>",
        between="",
        tokens=KIMI,
    ),
    Family(
        *("MiniMax M2", "minimax_m2", "<minimax:tool_call></minimax:tool_call><think>", "minimax_m2", "minimax_m2"),
        '<invoke name="get_weather">\n<parameter name="city">{city}</parameter>\n</invoke>',
        calls="<minimax:tool_call>\n{calls}\n</minimax:tool_call>",
        tokens=("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    Family(
        *("Seed-OSS", "seed_oss", "<seed:tool_call><seed:think>", "seed_oss", "seed_oss"),
        XML.replace("tool_call>", "seed:tool_call>"),
        think=("<seed:think>", "</seed:think>"),
        tokens=("<seed:tool_call>", "</seed:tool_call>"),
    ),
    Family(
        *("Gemma 4", "gemma4", "<|tool_call>call:{{ name }}<tool_call|><|channel>thought", "gemma4", "gemma4"),
        '<|tool_call>call:get_weather{city:<|"|>{city}<|"|>}<tool_call|>',
        between="",
        think=("", ""),  # only where the client asks for it
        tokens=("<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>", '<|"|>'),
    ),
    Family(
        *("FunctionGemma", "gemma3_text", "<start_function_call>call:", "functiongemma", None),
        "<start_function_call>call:get_weather{city:<escape>{city}<escape>}<end_function_call>",
        between="",
        tokens=("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    Family(
        *("Mistral Nemo", "mistral", "[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral", None, NAMED),
        calls="[TOOL_CALLS][{calls}]",
        between=", ",
        tokens=("[TOOL_CALLS]",),
    ),
    Family(
        *("LFM2", "lfm2", "List of tools: <|tool_list_start|>", "lfm2", None, PYTHON),
        calls="<|tool_call_start|>[{calls}]<|tool_call_end|>",
        between=", ",
        tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    Family(
        *("Olmo 3", "olmo3", "<function_calls></function_calls>", "olmo3", None, PYTHON),
        calls="<function_calls>\n{calls}\n</function_calls>",
    ),
    Family(
        *("ERNIE 4.5", "ernie4_5_moe", SHOWS_JSON + "<think></think>", "ernie45", "ernie45", JSON),
        think=("<think>", "</think>\n\n"),
        tokens=(*TOOL_CALL, "<response>", "</response>"),
    ),
    Family(
        "LongCat",
        "longcat_flash",
        "<longcat_tool_call>",
        "longcat",
        None,
        JSON.replace("tool_call>", "longcat_tool_call>"),
    ),
    Family(
        "ToolACE",
        "llama",
        "[func_name1(params_name1=params_value1)]",
        "pythonic",
        None,
        PYTHON,
        calls="[{calls}]",
        between=", ",
    ),
)

PLAIN = (
    Family("Gemma 3", "gemma3", "<start_of_turn>{{ role }}<end_of_turn>", None, None),
    Family("Mistral 7B 0.1", "mistral", "[INST] [/INST]", None, None),
    Family("gpt-oss", "gpt_oss", "<|start|>assistant<|channel|>analysis<|message|>", "openai", "openai_gptoss"),
    Family("Phi-4-mini", "phi3", "<|tool|>{{ tools }}<|/tool|>", None, None),
    Family("DeepSeek V3.2", "deepseek_v32", "", "deepseek_v32", "deepseek_v3"),
    Family("an unknown model that thinks", "new", SWITCH, None, None),
)
"""Families without a format, and those whose answers are not text: told by their models' types alone."""
