"""A first look of vLLM at a model: vLLM caches what it finds, which makes a later start seconds shorter.

`make setup` runs it.  Optional: a daemon that starts without it does the same.
"""

import os
import sys

from melld.config_text import parse_config
from melld.engine.arguments import COMMON_ENVIRONMENT, CPU_ENVIRONMENT, async_engine_args, engine_arguments

if __name__ == "__main__":
    os.environ.update(COMMON_ENVIRONMENT | CPU_ENVIRONMENT)
    config = parse_config("", "the command line", {"model.path": sys.argv[1], "devices.cpu": {}})
    async_engine_args(config.model.path, engine_arguments(config, "cpu")).create_engine_config()
