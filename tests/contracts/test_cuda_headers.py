"""ctypes checks nothing: the C compiler is asked about each struct, number and prototype."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pynvml
import pytest

from melld.engine import gpu_memory
from melld.kvstore import nvml
from melld.migrate.transports import cuda_runtime

INCLUDE = Path("/usr/local/cuda/include")
pytestmark = pytest.mark.skipif(
    not (INCLUDE / "cuda_runtime_api.h").exists() or shutil.which("gcc") is None,
    reason="the headers of CUDA's toolkit, or gcc, are not installed",
)
CALLS = {
    "cudaIpcGetMemHandle": "cudaError_t (*)(cudaIpcMemHandle_t *, void *)",
    "cudaIpcOpenMemHandle": "cudaError_t (*)(void **, cudaIpcMemHandle_t, unsigned int)",
    "cudaIpcCloseMemHandle": "cudaError_t (*)(void *)",
    "cudaMemcpyBatchAsync": (
        "cudaError_t (*)(void *const *, const void *const *, const size_t *, size_t, "
        "struct cudaMemcpyAttributes *, size_t *, size_t, cudaStream_t)"
    ),
    "cudaGetLastError": "cudaError_t (*)(void)",
    "cudaGetErrorString": "const char *(*)(cudaError_t)",
    "cuMemGetAddressRange_v2": "CUresult (*)(CUdeviceptr *, size_t *, CUdeviceptr)",
    "cuInit": "CUresult (*)(unsigned int)",
    "cuGetErrorString": "CUresult (*)(CUresult, const char **)",
    "cuMemGetAllocationGranularity": (
        "CUresult (*)(size_t *, const CUmemAllocationProp *, CUmemAllocationGranularity_flags)"
    ),
    "cuMemCreate": (
        "CUresult (*)(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long)"
    ),
    "cuMemExportToShareableHandle": (
        "CUresult (*)(void *, CUmemGenericAllocationHandle, CUmemAllocationHandleType, unsigned long long)"
    ),
    "cuMemImportFromShareableHandle": (
        "CUresult (*)(CUmemGenericAllocationHandle *, void *, CUmemAllocationHandleType)"
    ),
    "cuMemAddressReserve": "CUresult (*)(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long)",
    "cuMemMap": "CUresult (*)(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long)",
    "cuMemRelease": "CUresult (*)(CUmemGenericAllocationHandle)",
    "cuMemSetAccess": "CUresult (*)(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t)",
}
NUMBERS = {
    "cudaSuccess": 0,
    "CUDA_SUCCESS": 0,
    "cudaIpcMemLazyEnablePeerAccess": cuda_runtime._LAZY_ENABLE_PEER_ACCESS,
    "cudaMemcpySrcAccessOrderStream": cuda_runtime._SOURCE_ACCESS_IN_STREAM_ORDER,
    "cudaMemcpyFlagPreferOverlapWithCompute": cuda_runtime._PREFER_OVERLAP_WITH_COMPUTE,
    "CU_MEM_ALLOCATION_TYPE_PINNED": gpu_memory._PINNED,
    "CU_MEM_LOCATION_TYPE_DEVICE": gpu_memory._DEVICE,
    "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR": gpu_memory._FILE_DESCRIPTOR,
    "CU_MEM_ACCESS_FLAGS_PROT_READWRITE": gpu_memory._READ_WRITE,
    "CU_MEM_ALLOC_GRANULARITY_RECOMMENDED": gpu_memory._RECOMMENDED,
    "sizeof(CUmemGenericAllocationHandle)": ctypes.sizeof(ctypes.c_uint64),
    "sizeof(CUmemLocation)": ctypes.sizeof(gpu_memory.Location),
    "sizeof(CUmemAllocationProp)": ctypes.sizeof(gpu_memory.Properties),
    "sizeof(CUmemAccessDesc)": ctypes.sizeof(gpu_memory.Access),
    "offsetof(CUmemLocation, id)": gpu_memory.Location.id.offset,
    "offsetof(CUmemAllocationProp, type)": gpu_memory.Properties.type.offset,
    "offsetof(CUmemAllocationProp, requestedHandleTypes)": gpu_memory.Properties.handle_types.offset,
    "offsetof(CUmemAllocationProp, location)": gpu_memory.Properties.location.offset,
    "offsetof(CUmemAllocationProp, win32HandleMetaData)": gpu_memory.Properties.rest.offset,
    "offsetof(CUmemAccessDesc, flags)": gpu_memory.Access.flags.offset,
    "sizeof(cudaIpcMemHandle_t)": ctypes.sizeof(cuda_runtime.IpcHandle),
    "sizeof(struct cudaMemLocation)": ctypes.sizeof(cuda_runtime._Location),
    "sizeof(struct cudaMemcpyAttributes)": ctypes.sizeof(cuda_runtime._CopyAttributes),
    "sizeof(CUdeviceptr)": ctypes.sizeof(ctypes.c_uint64),
    "sizeof(size_t)": ctypes.sizeof(ctypes.c_size_t),
    "sizeof(enum cudaMemcpySrcAccessOrder)": ctypes.sizeof(ctypes.c_int),
    **{
        f"offsetof(struct {struct}, {theirs})": getattr(getattr(cuda_runtime, ours), field).offset
        for struct, ours, fields in (
            ("cudaMemLocation", "_Location", {"type": "type", "id": "id"}),
            (
                "cudaMemcpyAttributes",
                "_CopyAttributes",
                {
                    "source_access_order": "srcAccessOrder",
                    "source_hint": "srcLocHint",
                    "destination_hint": "dstLocHint",
                    "flags": "flags",
                },
            ),
        )
        for field, theirs in fields.items()
    },
}


def complaints(include: Path, first_cuda: tuple[int, int] = cuda_runtime._BATCH_SINCE_CUDA) -> str:
    """Return the compiler's complaints about all our declarations, with these headers."""
    lines = ["#include <stddef.h>", "#include <cuda.h>", "#include <cuda_runtime_api.h>"]
    lines += [f'_Static_assert({name} == {number}, "{name}");' for name, number in NUMBERS.items()]
    lines += [f"__typeof__(({kind})0) call_{name} = {name};" for name, kind in CALLS.items()]
    major, minor = first_cuda
    lines += [f'_Static_assert(CUDART_VERSION >= {major * 1000 + minor * 10}, "too old");']
    command = ["gcc", "-x", "c", "-", "-fsyntax-only", "-Wno-deprecated", "-Werror=incompatible-pointer-types"]
    done = subprocess.run(
        [*command, f"-I{include}"], input="\n".join(lines), text=True, capture_output=True, check=False
    )
    return done.stderr


def test_each_struct_number_and_prototype_matches_cuda() -> None:
    """A wrong offset here would copy from a wrong address there."""
    assert complaints(INCLUDE) == ""


@pytest.mark.parametrize(
    ("header", "pattern", "instead", "named"),
    [
        (
            "driver_types.h",
            r"(#define CUDA_IPC_HANDLE_SIZE) 64",
            r"\1 128",
            "cudaIpcMemHandle_t",
        ),
        ("driver_types.h", r"(cudaMemcpySrcAccessOrderStream\s*= )0x1", r"\g<1>0x4", "cudaMemcpySrcAccessOrderStream"),
        ("driver_types.h", r"(struct cudaMemLocation srcLocHint;)", r"int more; \1", "srcLocHint"),
        ("cuda.h", r"(CU_MEM_ACCESS_FLAGS_PROT_READWRITE\s*= )0x3", r"\g<1>0x5", "PROT_READWRITE"),
        ("cuda.h", r"(CUmemAllocationHandleType requestedHandleTypes;)", r"int more; \1", "requestedHandleTypes"),
        ("driver_types.h", r"(#define cudaIpcMemLazyEnablePeerAccess\s+)0x01", r"\g<1>0x02", "LazyEnablePeerAccess"),
        # The form before 13.0, with a place for the index of a copy that failed.
        (
            "cuda_runtime_api.h",
            r"(size_t numAttrs, )(cudaStream_t stream\);)",
            r"\1size_t *failIdx, \2",
            "pointer-types",
        ),
    ],
)
def test_a_header_that_differs_is_noticed(tmp_path: Path, header: str, pattern: str, instead: str, named: str) -> None:
    """The test above can fail: it does with a copy of the header in which one fact is changed."""
    for entry in INCLUDE.iterdir():  # a header finds others beside itself first
        if entry.name != header:
            (tmp_path / entry.name).symlink_to(entry)
    text, changed = re.subn(pattern, instead, (INCLUDE / header).read_text())
    assert changed
    (tmp_path / header).write_text(text)
    assert named in complaints(tmp_path)


def test_nvml_s_numbers_match_pynvml() -> None:
    """pynvml gives one of them as a tuple by mistake; once it does not, ours can go."""
    assert pynvml.NVML_P2P_CAPS_INDEX_READ == (nvml.P2P_READ,)
    assert pynvml.NVML_P2P_CAPS_INDEX_NVLINK == nvml.P2P_NVLINK
