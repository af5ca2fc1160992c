"""Many engines behind the same routes, on Ray Serve: `python -m lopa_ascend.serve --replicas N`, or `serve run`.

The ingress is the application of one server. Its clients talk to replicas, each of which is an engine of tp x bp ranks.
"""
