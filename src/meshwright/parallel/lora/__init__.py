"""Low-rank adapters beside frozen weights, which may be stored in blocks of 8 or 4 bits."""
