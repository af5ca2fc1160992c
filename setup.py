"""Which packages a build holds; everything else about the project stands in pyproject.toml."""

from setuptools import find_packages, setup

# These lie beside lopa_ascend/ and import from inside it. A build takes them from here and never needs the links
# lopa_ascend/graph and lopa_ascend/parallel, which are for running, testing and type-checking a checkout.
OUTSIDE = {
    "lopa_ascend.graph": "graph",
    "lopa_ascend.graph.fusion": "graph/fusion",
    "lopa_ascend.parallel": "parallel",
}
inside = find_packages(include=["lopa_ascend", "lopa_ascend.*"])

setup(
    packages=sorted({*inside, *OUTSIDE}),
    package_dir=OUTSIDE,
    include_package_data=False,  # exactly what the next line says, whatever an sdist's file list holds
    package_data={"lopa_ascend": ["py.typed", "demo/*.jsonl", "demo/model/*", "config/presets.json"]},
)
