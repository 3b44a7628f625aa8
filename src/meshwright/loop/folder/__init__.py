"""The folder of a run (`run_dir`), and its mirror in an object store (`remote_run`)."""
