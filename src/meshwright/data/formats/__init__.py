"""Formats of files: text, JSON lines, ArrayRecord, Parquet, Arrow and packed token ids."""
