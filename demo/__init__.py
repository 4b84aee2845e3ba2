"""`make demo`: a real kube-scheduler and a real Slurm share GPUs, with the story told."""
