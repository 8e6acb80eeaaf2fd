"""melld: an LLM serving daemon that keeps running requests packed on as few GPUs as possible."""

__version__ = "0.1.0"
