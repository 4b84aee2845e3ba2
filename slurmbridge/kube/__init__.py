"""The Kubernetes side: adapters between kube-apiserver and the vocabulary of the pool.

`access` (who we are), `session` (bytes), `status` (errors), `reflector` (what is there), `write`
(what we change), `events` (what we tell people), `lease` (which replica leads).
"""
