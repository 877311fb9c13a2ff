"""The native kernels, an optional extension: without a C++ compiler it is left out."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "specter_runtime.kernels.native",
            ["runtime/specter_runtime/kernels/native.cpp"],
            extra_compile_args=[
                "-O3",
                "-std=c++20",
                "-pthread",
                "-fno-math-errno",
                "-ffp-contract=off",  # where steps are fused, the source says so
            ],
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        )
    ]
)
