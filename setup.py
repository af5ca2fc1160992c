"""Which packages and kernels a build holds; everything else about the project stands in pyproject.toml."""

import platform
import sys

from setuptools import Extension, find_packages, setup

# A library of C functions, not a module of Python, which lopa_ascend/backend/cpu/native/kernels.py loads: one wheel is
# for all versions of Python. It is linked without an OpenMP library, to use the one that torch has loaded. Without a
# compiler the project is installed without the kernels.
NATIVE = "lopa_ascend/backend/cpu/native"
KERNELS = Extension(
    "lopa_ascend.backend.cpu.native.compiled",
    [f"{NATIVE}/attention.cpp", f"{NATIVE}/bf16.cpp", f"{NATIVE}/int8.cpp", f"{NATIVE}/rows.cpp"],
    depends=[f"{NATIVE}/int8_strip.h", f"{NATIVE}/vectors.h"],
    # Sums and products are rounded one by one, as the definitions of the ops have it.
    extra_compile_args=["-std=c++17", "-O3", "-ffp-contract=off", "-fopenmp"],
    language="c++",
    py_limited_api=True,
    optional=True,
)
has_kernels = sys.platform == "linux" and platform.machine() == "x86_64"

setup(
    ext_modules=[KERNELS] if has_kernels else [],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
    packages=find_packages(include=["lopa_ascend", "lopa_ascend.*"]),
    include_package_data=False,  # exactly what the next line says, whatever an sdist's file list holds
    package_data={
        "lopa_ascend": ["py.typed", "demo/*.jsonl", "demo/model/*", "config/presets.json"],
        "lopa_ascend.serve.view": ["index.html", "*.css", "*.js", "*.svg"],
    },
)
