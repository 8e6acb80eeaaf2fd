"""What schemathesis is told for `fuzz_api.py`: most bodies name the model that there is, and so get far.

Read by schemathesis (`SCHEMATHESIS_HOOKS`), in its own environment.
"""

from typing import Any

import schemathesis


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:  # noqa: ARG001  the name is schemathesis'
    """Three bodies in four ask for `demo`; the rest for whatever they were made with."""
    if isinstance(body, dict) and len(str(body)) % 4:
        body["model"] = "demo"
    return body
