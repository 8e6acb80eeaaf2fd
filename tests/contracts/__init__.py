"""Every assumption about CUDA, torch and vLLM that only matters on a GPU, checked without one.

| module of melld | facts | held by |
|---|---|---|
| `transports/cuda_runtime.py` | C prototypes, structs, enumerators, the CUDA that has them | `test_cuda_headers` |
| `transports/cuda_*.py`, `residency/runner.py` | torch's streams, events, devices, generators | `test_torch_cuda` |
| `worker/forking.py` | what is imported ahead, and makes no thread | `test_vllm_cuda`, `test_one_thread` |
| `transports/cuda_kernel.py` | what Triton is told not to specialise | `test_torch_cuda` |
| `arguments.py`, `daemon/devices.py` | environment, defaults of `vllm serve` | `test_torch_cuda`, `test_vllm_cuda` |
| `transports/layout.py`, `residency/memory.py` | one allocation, how blocks lie in it | `test_kv_layouts` |
| `worker/residency/`, `worker/start.py` | both runners, the scheduler, sleep mode's pools | `test_vllm_cuda` |
| `kvstore/nvml.py` | numbers of NVML | `test_cuda_headers` |

What also runs here (the V1 runner, the scheduler) is held by `tests/engine/worker/residency/contract.py`, in a live
engine.  What no source says is left to `make gpu-check`: speeds, the order of streams, whether bytes arrive.
"""
