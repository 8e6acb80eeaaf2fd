"""A machine with GPUs, for tests: a fake NVML library built from C, and a process that uses it through pynvml."""
