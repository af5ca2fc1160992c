"""Parts of ``scripts.bench_decode``: the workload, the stand-in of the published code, the parts of a step."""
