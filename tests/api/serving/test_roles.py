"""Instructions reach the model under any role and at any position."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from melld.api.serving.roles import Renderer, in_known_roles

DEVELOPER = {"role": "developer", "content": "Be brief."}
SYSTEM = {"role": "system", "content": [{"type": "text", "text": "Be kind."}]}
USER = {"role": "user", "content": "Hello"}
OF_EACH = "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}"
ONLY_KNOWN = "{% for one in messages if one.role in ('system', 'user') %}{{ one.content }}{% endfor %}"
STRICT = """{% for one in messages %}{% if one.role == 'system' and not loop.first or one.role == 'developer' %}
{{ raise_exception('unexpected') }}{% endif %}{{ one.content }}{% endfor %}"""


def test_a_role_unknown_to_the_template_becomes_system() -> None:
    """Codex sends all its task instructions as `developer`."""
    said = in_known_roles([DEVELOPER, USER, SYSTEM], knows_developer=False, is_system_first=False)
    assert said == [{"role": "system", "content": "Be brief."}, USER, SYSTEM]


def test_instructions_move_to_the_front_where_the_template_demands() -> None:
    """Claude Code and Codex send more of them mid-conversation."""
    said = in_known_roles([DEVELOPER, USER, SYSTEM], knows_developer=False, is_system_first=True)
    assert said == [{"role": "system", "content": "Be brief.\n\nBe kind."}, USER]


def test_what_the_template_accepts_is_left_unchanged() -> None:
    """The prompt begins as before, so the prefix cache still hits."""
    for messages in ([DEVELOPER, USER], [DEVELOPER, USER, DEVELOPER]):
        assert in_known_roles(messages, knows_developer=True, is_system_first=True) is messages
    assert in_known_roles([USER, SYSTEM], knows_developer=True, is_system_first=False) == [USER, SYSTEM]


@pytest.mark.parametrize(
    ("template", "knows_developer", "is_system_first"),
    [(None, True, False), (OF_EACH, True, False), (ONLY_KNOWN, False, False), (STRICT, False, True)],
    ids=["the demo model's", "any role", "drops it", "raises"],
)
def test_a_template_s_roles_are_probed(
    demo_model: Path, template: str | None, knows_developer: bool, is_system_first: bool
) -> None:
    """Some templates raise on an unknown role, others silently drop its message."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    renderer: Any = Renderer.__new__(Renderer)
    renderer.renderer = SimpleNamespace(tokenizer=tokenizer, get_tokenizer=lambda: tokenizer)
    renderer.chat_template = template or tokenizer.chat_template
    assert renderer._knows_developer == knows_developer
    assert renderer._is_system_first == is_system_first
