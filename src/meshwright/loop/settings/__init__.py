"""The options of a run: how they are read, checked and turned into models, meshes and optimizers."""
