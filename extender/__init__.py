"""The kube-scheduler extender: wire -> sight -> filter -> bind.

It knows no Slurm and takes no decision that lasts: it scores on the view that the bridge streams
to it, and posts Bindings for claims that the bridge has granted. Any number of replicas may run.
"""
