"""The places in other packages that seams hold on to: read from their source, and known by a digest.

`python -m tests.contracts.places` writes `places.json` anew, once each change that a test has named was looked at.
With a directory of packages (an unpacked wheel) it prints instead what has changed there: what an upgrade costs.
"""

import hashlib
import json
import re
import sys
from pathlib import Path

from tests.contracts.sources import definitions_in, installed, part_of, tree_of

PLACES = Path(__file__).with_suffix(".json")
GONE = "gone"


def places() -> dict[str, dict[str, str]]:
    """Return each seam's places: a file and a name in it, with the digest from the last review."""
    found: dict[str, dict[str, str]] = json.loads(PLACES.read_text())
    return found


def digest_of(place: str, packages: Path | None = None) -> str:
    """The digest of a definition's source, or of the lines with a name that is defined elsewhere; else `GONE`."""
    file, name = place.split()
    path = installed(file) if packages is None else packages / file
    if not path.exists():
        return GONE
    text = path.read_text()
    first, *rest = name.split(".")
    is_defined = first in definitions_in(tree_of(text))
    if is_defined and (not rest or rest[0] in definitions_in(definitions_in(tree_of(text))[first])):
        source = part_of(text, name)
    elif rest:
        return GONE
    else:
        source = "\n".join(line.strip() for line in text.splitlines() if re.search(rf"\b{name}\b", line))
    return hashlib.sha256(source.encode()).hexdigest()[:12] if source else GONE


def changed(seam: str, packages: Path | None = None) -> dict[str, str]:
    """Return a seam's places whose source has changed or gone."""
    now = {place: digest_of(place, packages) for place in places()[seam]}
    return {
        place: "gone" if now[place] == GONE else "changed" for place, old in places()[seam].items() if now[place] != old
    }


if __name__ == "__main__":
    if len(sys.argv) > 1:
        for seam in places():
            for place, how in changed(seam, Path(sys.argv[1])).items():
                print(f"{seam}: {place} {how}")  # noqa: T201
    else:
        now = {seam: {place: digest_of(place) for place in known} for seam, known in places().items()}
        PLACES.write_text(json.dumps(now, indent=1) + "\n")
