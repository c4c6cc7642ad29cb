"""`python -m horizonrl.ops.deploy.trial`: a run's manifests on one machine without Kubernetes.

It takes the overlay as `kubectl kustomize` renders it, NATS' chart with our values, and a root file system that the
Dockerfile's steps have made (`ops/deploy/docker/rootfs.sh`). Each pod becomes a container of `runc`, the runtime of
most nodes, with the command, the environment, the files, the user, the limits and the probes of its manifest.
"""
