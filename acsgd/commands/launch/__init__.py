"""The command `acsgd launch`: torchrun on this host, on several over ssh, or under Slurm."""
