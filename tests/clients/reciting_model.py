"""A tiny model that recites: calls the offered tool, counts, or says a sentence, whatever the client wrote.

Its chat template chooses the script and ends the prompt with that script's token; the weights map each token to the one
after it.  So it answers as a capable model would, at any temperature, with constraints or without.
"""

import itertools
import json
from pathlib import Path
from unittest import mock

import numpy as np
from tokenizers import AddedToken, Tokenizer

from melld import demo_model
from tests.tiny_models import change_config, read_weights, write_weights

COUNT_TO = 2500
NUMBERS = "".join(f" {number}" for number in range(1, COUNT_TO + 1))
"""What it says to who asks it to recite the numbers."""
HELLO, DONE = "Hello there, how may I help?", "That is all, it worked."
"""What it says otherwise, and after a tool's result."""
CITY = {"city": "Rome", "degrees": 21}
FILE, WRITTEN = "greeting.txt", "hello"
"""What an agent writes when its shell tool is called."""
COMMAND = f"echo {WRITTEN} > {FILE}"
EDIT = f"Here it is.\n\n{FILE}\n```\n{WRITTEN}\n```\n"
CALLS: dict[str, dict[str, object]] = {
    "get_weather": CITY,
    "final_result": CITY,
    "Weather": CITY,
    "PartialWeather": CITY,
    "exec_command": {"cmd": COMMAND},
    "shell_command": {"command": COMMAND},
    "shell": {"command": ["bash", "-c", COMMAND]},
    "run_shell_command": {"command": COMMAND, "is_background": False, "description": "Greet"},
    "bash": {"command": COMMAND, "description": "Greet"},
    "Bash": {"command": COMMAND, "description": "Greet"},
    "final_answer": {"answer": DONE},
}
"""The call of each tool; of several the first one that is offered."""
_START, _END = '<tool_call>\n{"name": ', "}\n</tool_call>"
_CHOICE = """\
{%- if add_generation_prompt -%}
    {{- start + 'assistant\\n' -}}
    {%- set said = messages | rejectattr('role', 'in', ('system', 'assistant')) | map(attribute='content') | join -%}
    {%- set script = namespace(name='hello') -%}
    {%- set offered = (tools or []) | map(attribute='function') | map(attribute='name') | list -%}
    {%- if messages | selectattr('role', 'equalto', 'tool') | list -%}
        {%- set script.name = 'done' -%}
    {%- elif 'final_answer' in offered and 'Observation' in said -%}
        {%- set script.name = 'final_answer' -%}
    {%- elif 'ecite the numbers' in said and 'title' not in said -%}
        {%- set script.name = 'numbers' -%}
    {%- elif tools -%}
        {%- set script.name = (CALLS | select('in', offered) | list + ['hello'])[0] -%}
    {%- elif 'greeting.txt' in said -%}
        {%- set script.name = 'edit' -%}
    {%- elif 'degrees' in said -%}
        {%- set script.name = 'city' -%}
    {%- endif -%}
    {{- '<|recite ' + script.name + '|>' -}}
{%- endif -%}
"""


def scripts() -> dict[str, list[str]]:
    """Return what each script's tokens say; a text that stands in several is followed by the same in all of them."""
    words = {"hello": HELLO, "done": DONE, "edit": EDIT, "city": json.dumps(CITY)}
    made = {name: [f"{text[:9]}", text[9:]] for name, text in words.items()}
    made["numbers"] = [f" {number}" for number in range(1, COUNT_TO + 1)]
    for name, arguments in CALLS.items():
        text = json.dumps(arguments)
        made[name] = [f'{_START}"{name}", "arguments": {text[:4]}', text[4:], _END]
    return made


def make_reciting_model(directory: Path) -> None:
    """Write it into `directory`, with room for the long prompts of agents."""
    after: dict[str, str] = {}
    for name, pieces in scripts().items():
        chain = [f"<|recite {name}|>", *pieces, demo_model.END]
        for piece, following in itertools.pairwise(chain):
            assert after.setdefault(piece, following) == following, (name, piece)
    with mock.patch.multiple(demo_model, LAYERS=1):
        demo_model.make_demo_model(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(one, special=one.startswith("<|"), normalized=False) for one in after])
    tokenizer.save(str(directory / "tokenizer.json"))
    change_config(directory, vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=131072)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 4]}))
    template = (directory / "chat_template.jinja").read_text()
    ends = template.rindex("{%- if add_generation_prompt -%}")
    chosen = _CHOICE.replace("CALLS", repr(tuple(CALLS)))
    (directory / "chat_template.jinja").write_text(template[:ends] + chosen)
    _wire(directory, {tokenizer.token_to_id(one): tokenizer.token_to_id(other) for one, other in after.items()})


def _wire(directory: Path, after: dict[int, int]) -> None:
    """Let each token be followed by the given one: nothing but its embedding reaches the last layer."""
    weights = read_weights(directory)
    size = json.loads((directory / "config.json").read_text())["vocab_size"]
    embeddings = np.random.default_rng(3).standard_normal((size, demo_model.HIDDEN), dtype=np.float32)
    head = np.zeros_like(embeddings)
    for one, other in after.items():
        head[other] += embeddings[one] * np.float32(80 / demo_model.HIDDEN)  # a logit of 80; others' are below 25
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"model.layers.0.{name}.weight"] *= 0
    write_weights(directory, weights | {"model.embed_tokens.weight": embeddings, "lm_head.weight": head})
