"""One module for each way to start processes: this host, Open MPI, Slurm, Ray, Kubernetes and SkyPilot."""
