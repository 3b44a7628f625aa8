"""Starting the processes of a run on a cluster, watching them, and restarting them; imports no JAX."""
