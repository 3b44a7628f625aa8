"""Where the weights of a run come from: a folder, a checkpoint, an adapter, or their origin on resume."""
