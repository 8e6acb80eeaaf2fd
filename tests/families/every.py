"""All families by name, and how a test gets the model of one."""

from pathlib import Path

from tests.families.family import Family, make_family
from tests.families.images import IMAGES
from tests.families.poolers import POOLERS
from tests.families.texts import TEXTS

FAMILIES: dict[str, Family] = TEXTS | POOLERS | IMAGES


def make_model_of(name: str, directory: Path) -> None:
    """Write the tiny model of the family of this name into `directory`."""
    make_family(FAMILIES[name], directory)
