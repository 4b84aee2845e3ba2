"""One pool of GPU nodes, two schedulers: the bridge. See docs/journey-of-a-pod.md."""
