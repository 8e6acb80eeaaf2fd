"""Workers whose steps last as long as on a device of their own, asleep for what the processor does not need of it."""

import os
from pathlib import Path

PACED = """
import time
from melld.engine.worker import main
made = main.EngineLoop.__init__
def paced(self, *arguments):
    made(self, *arguments)
    engine, budget = self._engine, self._parts.budget
    step = engine.step_fn
    def slow():
        end_s = time.monotonic() + {step_s}
        outputs = step()
        if budget._in_flight:
            counts = budget._in_flight[-1]
            end_s += {decode_s} * counts.decodes + {prompt_token_s} * counts.prompt_tokens
        time.sleep(max(0.0, end_s - time.monotonic()))
        return outputs
    engine.step_fn = slow
main.EngineLoop.__init__ = paced
"""


def paced_environment(
    directory: Path, step_s: float, decode_s: float, prompt_token_s: float, more: str = ""
) -> dict[str, str]:
    """Return the environment of a daemon whose processes begin with that program and `more`, written to `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    program = PACED.format(step_s=step_s, decode_s=decode_s, prompt_token_s=prompt_token_s)
    (directory / "sitecustomize.py").write_text(program + more)
    return {"PYTHONPATH": os.pathsep.join([str(directory.resolve()), os.environ.get("PYTHONPATH", "")])}
